//! `leasehold run --gpu` and `leasehold gpus`, without a driver and with a fake one.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::run_support::{Ended, Job, World, wait_for};
use rustix::process::Signal;

/// Writes the devices it sees and its name, and runs until its stdin is closed.
const STAY: &str = "echo $CUDA_VISIBLE_DEVICES $0 >> entered; cat > /dev/null; echo $0 >> left";

/// Starts `leasehold run --gpu … -- sh -c STAY NAME`. The test closes its stdin.
fn stay(world: &World, gpu: &[&str], name: &str) -> Job {
    let mut command = world.run(gpu);
    command.args(["--", "sh", "-c", STAY, name]).stdin(Stdio::piped()).env_remove("CUDA_VISIBLE_DEVICES");
    Job::start(without_driver(&mut command))
}

/// Hides the driver of this machine, if it has one.
fn without_driver(command: &mut Command) -> &mut Command {
    command.env("LEASEHOLD_NVML", "/nowhere/libnvidia-ml.so.1")
}

fn end(job: &mut Job) {
    drop(job.0.stdin.take());
    assert_eq!(job.wait(), 0);
}

const TWO: [&str; 4] = ["--gpu", "any", "--gpus", "2"];

/// Two devices and five runs: two at a time, in queue order; a killed run frees its device.
fn five_share_two(world: &World) {
    let mut jobs = Vec::new();
    for n in 0..5 {
        jobs.push(stay(world, &TWO, &format!("job-{n}")));
        // Each run holds a device or is in the queue before the next one starts.
        match n {
            0 | 1 => drop(world.lines("entered", n + 1)),
            _ => wait_for("a place in line", || (world.waiters("gpu_lock:0") == n - 1).then_some(())),
        }
    }
    assert_eq!(world.lines("entered", 2), ["0 job-0", "1 job-1"], "two distinct devices");
    assert_eq!(world.waiters("gpu_lock:1"), 3, "a request for any device waits in every queue");

    end(&mut jobs[1]);
    assert_eq!(world.lines("entered", 3)[2], "1 job-2", "the first in line, on the device that became free");
    jobs[0].signal(Signal::KILL);
    assert_eq!(world.lines("entered", 4)[3], "0 job-3", "a killed one frees its device");
    end(&mut jobs[2]);
    assert_eq!(world.lines("entered", 5)[4], "1 job-4");
    for job in &mut jobs[3..] {
        end(job);
    }
    assert_eq!(std::fs::read_to_string(world.path("left")).expect("some left"), "job-1\njob-2\njob-3\njob-4\n");
    for gpu in ["gpu_lock:0", "gpu_lock:1"] {
        assert!(!world.is_held(gpu), "{gpu} is left behind");
    }
}

#[test]
fn five_runs_share_two_gpus_in_order_on_sqlite() {
    five_share_two(&World::sqlite());
}

#[test]
fn five_runs_share_two_gpus_in_order_on_redis() {
    five_share_two(&World::redis());
}

/// Five runs at the same time: never two on one device.
#[test]
fn five_runs_at_once_never_meet_on_a_gpu() {
    const ALONE: &str = "mkdir on-$CUDA_VISIBLE_DEVICES || echo $CUDA_VISIBLE_DEVICES >> met; \
        echo $(env | grep ^CUDA_ | sort) >> seen; rmdir on-$CUDA_VISIBLE_DEVICES";
    for world in World::all() {
        let start = |_| Job::start(without_driver(world.run(&TWO).args(["--", "sh", "-c", ALONE])));
        let mut jobs: Vec<Job> = (0..5).map(start).collect();
        for job in &mut jobs {
            assert_eq!(job.wait(), 0);
        }
        assert!(!world.path("met").exists(), "two on one device");
        let seen = world.lines("seen", 5);
        let known = [0, 1].map(|id| format!("CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={id}"));
        assert!(seen.iter().all(|seen| known.contains(seen)), "{seen:?}");
    }
}

#[test]
fn gpus_can_be_requested_by_count_and_by_number() {
    for world in World::all() {
        let env = |args: &[&str]| {
            let script = "echo $CUDA_VISIBLE_DEVICES $LEASEHOLD_NAME";
            let ended = Ended::of(without_driver(world.run(args).args(["--", "sh", "-c", script])));
            assert_eq!(ended.code, Some(0), "{ended:?}");
            ended.out
        };
        assert_eq!(env(&["--gpu", "any:2", "--gpus", "3"]), "0,1 gpu_lock:0,gpu_lock:1\n");
        assert_eq!(env(&["--gpu", "2", "--gpus", "3"]), "2 gpu_lock:2\n");
        assert_eq!(env(&["--gpu", "2,0", "--gpus", "3"]), "0,2 gpu_lock:0,gpu_lock:2\n");
        // One is in use: the others are granted, and a request for that one gives up in time.
        let mut job = stay(&world, &["--gpu", "1", "--gpus", "3"], "holder");
        world.lines("entered", 1);
        assert_eq!(env(&["--gpu", "any:2", "--gpus", "3"]), "0,2 gpu_lock:0,gpu_lock:2\n");
        for wanted in ["1", "any:3", "0,1"] {
            let ended =
                Ended::of(without_driver(&mut world.run(&["--no-wait", "--gpu", wanted, "--gpus", "3", "--", "true"])));
            assert_eq!(ended.code, Some(75), "{wanted}: {ended:?}");
            assert!(ended.err.contains("is held by sh@"), "{ended:?}");
        }
        end(&mut job);
        // Without a driver, CUDA_VISIBLE_DEVICES lists the devices.
        let mut shown = world.run(&["--gpu", "any", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]);
        let ended = Ended::of(without_driver(&mut shown).env("CUDA_VISIBLE_DEVICES", "5,7"));
        assert_eq!(ended.out, "5\n", "{ended:?}");
        // With the scope `host`, every machine has its own GPU 0.
        let mut own = world.run(&["--gpu", "0", "--gpus", "1", "--", "sh", "-c", "echo $LEASEHOLD_NAME"]);
        let ended = Ended::of(without_driver(&mut own).env("LEASEHOLD_GPU_SCOPE", "host"));
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        assert_eq!(ended.out, format!("gpu_lock:{host}:0\n"), "{ended:?}");
        // The configuration file can set the scope; the environment overrides it.
        std::fs::write(world.path("locks.yaml"), "gpu_scope: host\n").expect("written");
        let ended =
            Ended::of(without_driver(&mut own).env_remove("LEASEHOLD_GPU_SCOPE").env("LEASEHOLD_CONFIG", "locks.yaml"));
        assert_eq!(ended.out, format!("gpu_lock:{host}:0\n"), "{ended:?}");
        let ended = Ended::of(own.env("LEASEHOLD_GPU_SCOPE", "shared"));
        assert_eq!(ended.out, "gpu_lock:0\n", "{ended:?}");
    }
}

#[test]
fn impossible_gpu_requests_are_rejected() {
    let world = World::sqlite();
    for (args, code, message) in [
        (
            &["--gpu", "any", "--", "true"][..],
            78,
            "there is no NVIDIA driver (/nowhere/libnvidia-ml.so.1 cannot be loaded)",
        ),
        (&["--gpu", "any:3", "--gpus", "2", "--", "true"], 64, "3 GPUs were requested, but this machine has 2"),
        (&["--gpu", "2", "--gpus", "2", "--", "true"], 64, "is not in the pool, which has 0, 1"),
        (&["--gpu", "any", "--gpus", "0", "--", "true"], 64, "1 to 64"),
        (&["--gpu", "some", "--gpus", "2", "--", "true"], 64, "write any, any:2, 0 or 0,1"),
        (&["--gpu", "0,0", "--gpus", "2", "--", "true"], 64, "twice"),
        (&["--gpus", "2", "name", "--", "true"], 64, "--gpu"),
        (&["--gpu", "any", "--gpus", "2", "name", "--", "true"], 64, "cannot be used with"),
    ] {
        let ended = Ended::of(without_driver(&mut world.run(args)).env_remove("CUDA_VISIBLE_DEVICES"));
        assert_eq!(ended.code, Some(code), "{args:?}: {ended:?}");
        assert!(ended.err.contains(message), "{args:?}: {ended:?}");
    }
    let mut hidden = world.run(&["--gpu", "any", "--", "true"]);
    let ended = Ended::of(without_driver(&mut hidden).env("CUDA_VISIBLE_DEVICES", ""));
    assert!(ended.code == Some(78) && ended.err.contains("lists no GPU"), "{ended:?}");
    let mut scope = world.run(&["--gpu", "any", "--gpus", "2", "--", "true"]);
    let ended = Ended::of(scope.env("LEASEHOLD_GPU_SCOPE", "mine"));
    assert!(ended.code == Some(78) && ended.err.contains("neither `shared` nor `host`"), "{ended:?}");
    std::fs::write(world.path("locks.yaml"), "gpu_scope: mine\n").expect("written");
    for args in [&["run", "--gpu", "any", "--gpus", "2", "--", "true"][..], &["gpus", "--gpus", "2"]] {
        let ended = Ended::of(world.leasehold(args).env("LEASEHOLD_CONFIG", "locks.yaml"));
        assert!(
            ended.code == Some(78) && ended.err.starts_with("leasehold: locks.yaml:1:12: gpu_scope: "),
            "{ended:?}"
        );
    }
}

/// Compiles a driver that has three devices.
fn driver(world: &World) -> PathBuf {
    let library = world.path("libnvidia-ml.so.1");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_nvml.c");
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).status();
    assert!(compiled.expect("a C compiler").success());
    library
}

#[test]
fn a_driver_names_its_devices() {
    let world = World::sqlite();
    let library = driver(&world);
    let with_driver = |mut command: Command| {
        let ended = Ended::of(command.env("LEASEHOLD_NVML", &library).env_remove("CUDA_VISIBLE_DEVICES"));
        assert_eq!(ended.code, Some(0), "{ended:?}");
        ended.out
    };
    let script = "echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER";
    let seen = with_driver(world.run(&["--gpu", "any:2", "--", "sh", "-c", script]));
    assert_eq!(seen, "GPU-00000000-fake,GPU-00000001-fake PCI_BUS_ID\n");

    let mut job = world.run(&["--gpu", "1", "--owner", "tts", "--", "sh", "-c", STAY, "tts"]);
    job.stdin(Stdio::piped()).env("LEASEHOLD_NVML", &library).env_remove("CUDA_VISIBLE_DEVICES");
    let mut job = Job::start(&mut job);
    world.lines("entered", 1);
    let table = with_driver(world.leasehold(&["gpus"]));
    let lines: Vec<Vec<&str>> =
        table.lines().map(|line| line.split("   ").map(str::trim).filter(|c| !c.is_empty()).collect()).collect();
    assert_eq!(lines[0], ["GPU", "MODEL", "MEMORY", "HOLDER", "HELD", "WAITING"], "{table}");
    assert_eq!(lines[1], ["0", "Fake A100", "0.0 GiB of 40.0 GiB", "free", "–", "0"], "{table}");
    assert!(lines[2][..3] == ["1", "Fake A100", "10.0 GiB of 40.0 GiB"] && lines[2][3].starts_with("tts@"), "{table}");
    assert_eq!(lines.len(), 4, "{table}");

    let json: serde_json::Value =
        serde_json::from_str(&with_driver(world.leasehold(&["gpus", "--json"]))).expect("JSON");
    assert_eq!(json["source"]["driver"], "550.54.15");
    assert_eq!(json["gpus"][1]["uuid"], "GPU-00000001-fake");
    assert_eq!(json["gpus"][1]["memory"]["used_bytes"], 10_u64 << 30);
    assert_eq!((&json["gpus"][1]["lock"]["held"], &json["gpus"][2]["lock"]["held"]), (&true.into(), &false.into()));
    end(&mut job);
}

#[test]
fn without_a_driver_gpus_lists_the_held_gpu_locks() {
    let world = World::sqlite();
    let gpus = |args: &[&str]| {
        let mut command = world.leasehold(&["gpus"]);
        let ended = Ended::of(without_driver(command.args(args)).env_remove("CUDA_VISIBLE_DEVICES"));
        assert_eq!(ended.code, Some(0), "{ended:?}");
        ended
    };
    let none = gpus(&[]);
    assert!(
        none.out.is_empty() && none.err.contains("no NVIDIA driver") && none.err.contains("no GPU lock is held"),
        "{none:?}"
    );
    let mut job = stay(&world, &["--gpu", "1", "--gpus", "2"], "holder");
    world.lines("entered", 1);
    let held = gpus(&[]);
    assert!(held.err.contains("no NVIDIA driver") && held.out.lines().count() == 2, "{held:?}");
    assert!(held.out.lines().nth(1).expect("a line").starts_with("1 "), "{held:?}");
    let counted = gpus(&["--gpus", "2"]);
    assert!(counted.err.is_empty() && counted.out.lines().count() == 3, "{counted:?}");
    let json: serde_json::Value = serde_json::from_str(&gpus(&["--json"]).out).expect("JSON");
    assert!(
        json["source"].is_null() && json["problem"].as_str().expect("a reason").contains("no NVIDIA driver"),
        "{json}"
    );
    end(&mut job);
}

#[test]
fn doctor_warns_of_one_gpu_lock_on_several_hosts() {
    for world in World::all() {
        let doctor = || Ended::of(&mut world.leasehold(&["doctor"])).out;
        let mut job = stay(&world, &["--gpu", "0", "--gpus", "1"], "holder");
        world.lines("entered", 1);
        assert!(!doctor().contains("gpu_scope"), "{}", doctor());
        // Another host name is another machine to the store.
        let elsewhere = Command::new("unshare")
            .args(["--uts", "sh", "-c", "hostname elsewhere && exec \"$@\"", "-"])
            .arg(env!("CARGO_BIN_EXE_leasehold"))
            .args(["run", "--gpu", "0", "--gpus", "1", "--", "true"])
            .current_dir(world.dir.path())
            .env("LEASEHOLD_STORE", &world.url)
            .stdin(Stdio::null())
            .spawn();
        let mut elsewhere = Job(elsewhere.expect("unshare(1)"));
        if !rustix::process::geteuid().is_root() {
            eprintln!("not run: only root can give a process another host's name");
            return;
        }
        wait_for("a waiter elsewhere", || (world.waiters("gpu_lock:0") == 1).then_some(()));
        // A lock is in the index after half a second.
        let warned = wait_for("a warning", || {
            let said = doctor();
            said.lines().find(|line| line.starts_with("warn") && line.contains("gpu_scope")).map(str::to_owned)
        });
        assert!(warned.contains("elsewhere") && warned.contains("gpu_lock:0"), "{warned}");
        end(&mut job);
        assert_eq!(elsewhere.wait(), 0);
    }
}

/// Runs the commands of the guide.
#[test]
fn the_commands_of_the_guide_run() {
    let world = World::sqlite();
    let guide = include_str!("../../../../docs/share-the-gpus.md");
    let blocks: Vec<&str> = guide.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    let program = PathBuf::from(env!("CARGO_BIN_EXE_leasehold"));
    let path =
        format!("{}:{}", program.parent().expect("a directory").display(), std::env::var("PATH").expect("a path"));
    let type_in = |block: &str| {
        let mut shell = Command::new("sh");
        shell.args(["-e", "-c", block]).current_dir(world.dir.path()).env("PATH", &path);
        shell.env("LEASEHOLD_STORE", &world.url).env_remove("CUDA_VISIBLE_DEVICES").stdin(Stdio::null());
        let ended = Ended::of(without_driver(&mut shell));
        assert_eq!(ended.code, Some(0), "{block}: {ended:?}");
        ended.out
    };
    assert_eq!(blocks.len(), 2);
    assert_eq!(type_in(blocks[0]), "training on GPU 0\n");
    let table = type_in(blocks[1]);
    let row = |id: usize| table.lines().nth(id + 1).expect("a row").to_owned();
    assert!(row(0).contains("free") && row(1).contains("leasehold@"), "{table}");
}
