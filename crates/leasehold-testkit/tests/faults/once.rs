//! Work that is done once, with a fault at every step of a run.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use leasehold::once::{Outcome, Started};
use leasehold::{Error, Guard, LockManager};
use leasehold_testkit::proxy::{Command, Rule};
use leasehold_testkit::{FaultProxy, RedisServer, full_or, report};
use tokio::sync::Notify;

use crate::common::{LONG, OVERRUN, connect, ms, options};

/// The lease of the run with the fault.
const LEASE: Duration = ms(400);
/// Longer than that lease, shorter than the outage timeout.
const LATE: Duration = ms(1_000);
/// More than the commands of a run that contain its id.
const STEPS: usize = 8;
const THE_LATE_ONE: u32 = 1;
const THE_SUCCESSOR: u32 = 2;

/// What happens to one command of a run.
#[derive(Debug, Clone, Copy)]
enum Fault {
    CommandLate,
    ReplyLate,
    ReplyLost,
    CutBefore,
    CutAfter,
}

const FAULTS: [Fault; 5] = [Fault::CommandLate, Fault::ReplyLate, Fault::ReplyLost, Fault::CutBefore, Fault::CutAfter];

#[derive(Debug, Clone, Copy)]
struct Round {
    step: usize,
    fault: Fault,
    /// An earlier runner died and left its record.
    leftover: bool,
    /// The work of the delayed runner fails, so it removes its record.
    fails: bool,
    /// The next runner works until the delayed one has ended.
    successor_ends_last: bool,
}

/// Matches the command with this number among those that contain the id.
fn at(step: usize, id: &str) -> impl Fn(&Command) -> bool + Send + Sync + 'static {
    let (id, seen) = (id.as_bytes().to_vec(), AtomicUsize::new(0));
    move |command| {
        let names_it = command.args().any(|arg| arg.windows(id.len()).any(|part| part == id));
        names_it && seen.fetch_add(1, SeqCst) + 1 == step
    }
}

impl Round {
    fn arm(self, proxy: &FaultProxy, id: &str) -> Rule {
        let at = at(self.step, id);
        match self.fault {
            Fault::CommandLate => proxy.hold_before_forwarding(at, LATE, 1),
            Fault::ReplyLate => proxy.hold_reply_to(at, LATE),
            Fault::ReplyLost => proxy.swallow_reply_to(at, 1),
            Fault::CutBefore => proxy.cut_before_forwarding(at, 1),
            Fault::CutAfter => proxy.cut_after_forwarding(at, 1),
        }
    }

    /// `None` if the work failed.
    async fn late_run(self, locks: LockManager, id: String) -> Result<Option<Outcome<u32>>, Error> {
        let once = locks.once(id).ttl(LEASE).wait_up_to(LATE * 2);
        let work = async |_: &Guard| if self.fails { Err("in vain") } else { Ok(THE_LATE_ONE) };
        Ok(once.run_until_ok(work).await?.ok())
    }

    /// Checks that there is one result, which all callers got and which stays.
    async fn play(self, server: &RedisServer, direct: &LockManager) -> bool {
        let id = format!("{}-{:?}-{}{}{}", self.step, self.fault, self.leftover, self.fails, self.successor_ends_last);
        if self.leftover {
            let Ok(Started::Run(dead)) = direct.once(&id).start().await else { panic!("{id}: new") };
            drop(dead);
        }
        let proxy = FaultProxy::in_front_of(server);
        let mut options = options();
        options.request_timeout = ms(1_500);
        let locks = LockManager::connect_with(&proxy.url(), options).await.expect("a manager");
        let rule = self.arm(&proxy, &id);
        let (late_has_ended, hit) = (Arc::new(Notify::new()), rule.clone());
        let late = tokio::spawn({
            let (id, ended) = (id.clone(), late_has_ended.clone());
            async move {
                let outcome = self.late_run(locks, id).await;
                ended.notify_one();
                outcome
            }
        });
        tokio::select! {
            () = rule.wait_for_hits(1) => {}
            () = tokio::time::sleep(LATE) => {}
        }
        let successor = async |_: &Guard| {
            if self.successor_ends_last {
                late_has_ended.notified().await;
            }
            THE_SUCCESSOR
        };
        let next = direct.once(&id).wait_up_to(LONG).run(successor).await;
        let next = next.unwrap_or_else(|error| panic!("{self:?}: the successor has its result: {error}"));
        let late = late.await.expect("no panic");
        let stored = direct.once(&id).result::<u32>().await.expect("answered");
        assert_eq!(stored, Some(next.value), "{self:?}: {next:?}, {late:?}");
        assert!(next.stored, "{self:?}: {next:?}");
        if let Ok(Some(late)) = &late {
            assert!(!late.stored || late.value == next.value, "{self:?}: two results, {next:?} and {late:?}");
        }
        // Undo in the background has ended by now.
        tokio::time::sleep(ms(300)).await;
        assert_eq!(direct.once(&id).result::<u32>().await.expect("answered"), stored, "{self:?}: it stays");
        hit.hits() > 0
    }
}

/// At every step a runner is delayed beyond its lease or gets no reply, and another runner follows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f46_a_late_runner_does_not_change_the_next_runners_record() {
    let server = RedisServer::start().await;
    let direct = connect(&server.url()).await;
    let mut rounds = Vec::new();
    for step in 1..=STEPS {
        for fault in FAULTS {
            for bits in full_or([3, 5, 6, 0].as_slice(), &[0, 1, 2, 3, 4, 5, 6, 7]) {
                let [leftover, fails, successor_ends_last] = [1, 2, 4].map(|bit| bits & bit != 0);
                rounds.push(Round { step, fault, leftover, fails, successor_ends_last });
            }
        }
    }
    let mut hits = 0;
    for some in rounds.chunks(50) {
        let played = join_all(some.iter().map(|round| round.play(&server, &direct))).await;
        hits += played.into_iter().filter(|hit| *hit).count();
    }
    report(
        "F46",
        format!("{} runs with a fault at every step, {hits} met it: one result each, and it stays", rounds.len()),
    );
}

/// The record was gone when the result was to be stored, the reply to writing it again is lost, and then the connection is lost
/// again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f46_a_result_whose_answer_was_lost_stays() {
    let server = RedisServer::start().await;
    let direct = connect(&server.url()).await;
    for step in 1..=3 {
        let (id, proxy) = (format!("gone-{step}"), FaultProxy::in_front_of(&server));
        let locks = connect(&proxy.url()).await;
        let Ok(Started::Run(running)) = locks.once(&id).start().await else { panic!("{id}: new") };
        server.command(&["DEL", &format!("lh1:once:leasehold:{id}")]).await;
        proxy.cut_after_forwarding(at(step, &id), 1);
        // The next command: this rule does not see the command of the first rule.
        proxy.cut_before_forwarding(at(step, &id), 1);
        assert!(running.finish(b"7").await.expect("the lease is valid"), "{id}");
        // The store has the result although the reply was lost; nothing undoes it later.
        tokio::time::sleep(ms(500)).await;
        assert_eq!(direct.once(&id).result::<u32>().await.expect("answered"), Some(7), "{id}");
    }
}

/// Every call ends by its deadline, whichever request the store does not answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f46_a_run_ends_by_its_deadline() {
    let server = RedisServer::start().await;
    let mut longest = Duration::ZERO;
    for step in 1..=8 {
        let (id, proxy) = (format!("silent-{step}"), FaultProxy::in_front_of(&server));
        let locks = connect(&proxy.url()).await;
        let rule = proxy.swallow_reply_to(at(step, &id), 1);
        let (began, wait) = (Instant::now(), ms(100));
        match locks.once(&id).wait_up_to(wait).start().await {
            // It began before any reply was lost.
            Ok(started) => {
                assert!(matches!(started, Started::Run(_)), "{id}");
                continue;
            }
            Err(Error::Store { .. } | Error::NotAcquired { .. }) => {}
            Err(other) => panic!("{id}: {other}"),
        }
        assert_eq!(rule.hits(), 1);
        longest = longest.max(began.elapsed());
        assert!(began.elapsed() <= wait + OVERRUN, "K4: step {step} took {:?}", began.elapsed());
    }
    report("F46", format!("asked for 100 ms, the longest of 8 silent steps took {longest:.1?}"));
}
