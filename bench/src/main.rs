//! Benchmarks of leasehold against its peers: one run, one table. Every number is a ratio to a peer that was measured in
//! the same round. Rounds are interleaved, and the table has the medians.

mod client;
mod handoff;
mod release_loop;
mod sqlite;
mod steady;
mod throughput;

use leasehold_testkit::RedisServer;

/// How much to measure.
#[derive(Clone, Copy)]
struct Size {
    rounds: usize,
    /// Seconds one contender runs in one round.
    seconds: f64,
    handoffs: usize,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [mode, contender, tasks, seconds] = &arguments[..]
        && mode == "--only"
    {
        return only(contender, tasks.parse().expect("tasks"), seconds.parse().expect("seconds"));
    }
    let size = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--quick"] => Size { rounds: 9, seconds: 0.5, handoffs: 1_000 },
        [] => Size { rounds: 15, seconds: 2.0, handoffs: 10_000 },
        _ => {
            eprintln!(
                "usage: leasehold-bench [--quick | --only bare|rslock|fenced|unfenced|memory|client|handoff|sqlite TASKS SECONDS]"
            );
            std::process::exit(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let server = RedisServer::start().await;
        println!("{} rounds, interleaved; medians of ratios within a round\n", size.rounds);
        throughput::run(&server, size).await;
        client::run(&server, size).await;
        release_loop::run(&server, size).await;
        handoff::run(size).await;
        sqlite::run(size).await;
    });
}

/// Runs one contender alone, for a profiler. `client` and `sqlite` have no tasks: the number is that of rounds.
fn only(contender: &str, tasks: usize, seconds: f64) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        if contender == "sqlite" {
            let size = Size { rounds: tasks, seconds, handoffs: 0 };
            return sqlite::run(size).await;
        }
        let server = RedisServer::start().await;
        if contender == "client" {
            client::run(&server, Size { rounds: tasks, seconds, handoffs: 0 }).await;
        } else if contender == "handoff" {
            handoff::only(&server, tasks, seconds).await;
        } else {
            let rate = throughput::only(&server, contender, tasks, seconds).await;
            println!("{contender}, {tasks} tasks: {rate:.0} pairs/s");
        }
        if let redis::Value::BulkString(info) = server.command(&["INFO", "commandstats"]).await {
            let info = String::from_utf8_lossy(&info).into_owned();
            for line in info.lines().filter(|line| line.contains("usec_per_call")) {
                println!("  {}", line.split(",rejected").next().unwrap_or(line));
            }
        }
    });
}

/// The median.
fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// Prints a line of the table: what was measured, the ratio, its bound, and whether the bound holds.
fn row(what: &str, ratio: f64, bound: &str, holds: bool) {
    println!("{what:<52} {ratio:>8.2}   {bound:<10} {}", if holds { "ok" } else { "MISSED" });
}
