//! Many concurrent `leasehold run`: no lost update, FIFO order, nothing left in the store.

use std::process::Stdio;
use std::thread;

use crate::run_support::{Job, World, wait_for};
use leasehold_testkit::full_or;

const ADD_ONE: &str = "n=$(cat n); echo $((n + 1)) > n";

#[test]
fn no_update_is_lost() {
    let (processes, times) = full_or((6, 10), (12, 40));
    for world in World::all() {
        std::fs::write(world.path("n"), "0\n").expect("a file");
        thread::scope(|scope| {
            for _ in 0..processes {
                scope.spawn(|| {
                    for _ in 0..times {
                        let ended = world.output(&["n", "--", "sh", "-c", ADD_ONE]);
                        assert_eq!(ended.code, Some(0), "{ended:?}");
                    }
                });
            }
        });
        let kept = world.lines("n", 1).remove(0);
        assert_eq!(kept, (processes * times).to_string(), "updates were lost on {}", world.url);
        assert!(!world.is_held("n"));
        println!("{kept} of {} updates kept on {}", processes * times, world.url.split(':').next().expect("a scheme"));
    }
}

#[test]
fn runs_are_served_in_queue_order() {
    let count = full_or(15, 150);
    for world in World::all() {
        let mut holder =
            Job::start(&mut world.run(&["a", "--", "sh", "-c", "echo >> in; while [ ! -e go ]; do sleep 0.02; done"]));
        world.lines("in", 1);
        let mut waiting = Vec::new();
        for n in 1..=count {
            let script = format!("echo {n} >> order");
            waiting.push(Job::start(world.run(&["a", "--", "sh", "-c", &script]).stderr(Stdio::inherit())));
            wait_for("the next in line", || (world.waiters("a") == n).then_some(()));
        }
        std::fs::write(world.path("go"), "").expect("a file");
        assert_eq!(holder.wait(), 0);
        for job in &mut waiting {
            assert_eq!(job.wait(), 0);
        }
        let order: Vec<usize> = world.lines("order", count).iter().map(|n| n.parse().expect("a number")).collect();
        assert_eq!(order, (1..=count).collect::<Vec<_>>(), "out of order on {}", world.url);
        assert_eq!((world.is_held("a"), world.waiters("a")), (false, 0), "something is left");
    }
}
