//! What events do to the waiting rooms of a process.

use super::*;
use crate::client::Policy;
use crate::facts::{Fence, Owner, Ttl};
use crate::store::{Grant, Holder, Place, StoreErrorKind, Ticket};

/// A process with waiting rooms, on a clock that the test moves.
struct Process {
    rooms: Rooms<&'static str>,
    now_ms: u64,
    policy: Policy,
    may_resend: bool,
    source: Counter,
    name: LockName,
}

/// Tokens that count up, and no jitter.
struct Counter(u32);

impl crate::client::RandomSource for Counter {
    fn token(&mut self) -> Token {
        self.0 += 1;
        token(self.0)
    }
    fn byte(&mut self) -> u32 {
        0
    }
    fn wall_ms(&mut self) -> u64 {
        0
    }
}

fn token(number: u32) -> Token {
    Token::parse(&format!("{number:0width$}", width = Token::LEN)).expect("digits")
}

fn grant(fence: u64, asked_at_ms: u64) -> Grant {
    let asked_at = Moment::from_boot(Duration::from_millis(asked_at_ms));
    Grant { fence: Some(Fence::new(fence)), asked_at, lasts: Duration::from_secs(2) }
}

fn queued(ticket: u64, position: usize) -> Result<Acquire, StoreError> {
    Ok(Acquire::Queued(Place { ticket: Ticket(ticket), position, holder: None }))
}

fn queued_behind(ticket: u64, holder_fence: u64) -> Result<Acquire, StoreError> {
    let holder = Holder { fence: Some(Fence::new(holder_fence)), ..Holder::foreign(b"", None) };
    Ok(Acquire::Queued(Place { ticket: Ticket(ticket), position: 0, holder: Some(holder) }))
}

impl Process {
    fn new() -> Self {
        Self {
            rooms: Rooms::default(),
            now_ms: 1_000,
            policy: Policy {
                events: true,
                poll_interval: Duration::from_millis(10),
                max_poll_interval: Duration::from_millis(100),
                ask_again_within: Duration::from_secs(30),
                patience: Duration::from_secs(10),
            },
            may_resend: true,
            source: Counter(0),
            name: LockName::new("a").expect("a name"),
        }
    }

    /// What an event leads to, in a line per effect.
    fn after<R>(
        &mut self,
        event: impl FnOnce(&mut Rooms<&'static str>, &mut Context<'_>, &LockName) -> R,
    ) -> (R, Vec<String>) {
        let mut cx = Context {
            now: Moment::from_boot(Duration::from_millis(self.now_ms)),
            policy: &self.policy,
            may_resend: self.may_resend,
            source: &mut self.source,
        };
        let result = event(&mut self.rooms, &mut cx, &self.name);
        let number = |token: &Token| token.reveal().trim_start_matches('0').to_owned();
        let line = |effect| match effect {
            Effect::Ask { claim, ticket } => {
                format!("ask {} with {:?}", number(&claim.token), ticket.map(|Ticket(ticket)| ticket))
            }
            Effect::Give { task, token, record, .. } => format!("give {} to {task}, {record:?}", number(&token)),
            Effect::Fail { task, error, .. } => format!("fail {task}: {:?}", error.map(|error| error.kind())),
            Effect::Leave { claim, unanswered } => {
                format!("leave {}{}", number(&claim.token), if unanswered { ", unanswered" } else { "" })
            }
            Effect::HurryLeave(token) => format!("hurry {}", number(&token)),
            Effect::Report(standing) => format!("report {} rooms", standing.rooms),
        };
        let lines = self.rooms.take_effects().into_iter().map(line).filter(|line| !line.starts_with("report"));
        (result, lines.collect())
    }

    fn sit(&mut self, task: &'static str, ticket: Option<u64>) -> (SeatId, Vec<String>) {
        let ttl = Ttl::new(Duration::from_secs(30)).expect("a ttl");
        let ticket = ticket.map(Ticket);
        let seat = Seat { ttl, owner: Owner::default(), retry_every: None, ticket, task };
        self.after(|rooms, cx, name| rooms.sit(cx, name, seat))
    }

    fn answered(&mut self, number: u32, answer: Result<Acquire, StoreError>) -> Vec<String> {
        self.after(|rooms, cx, _| rooms.answered(cx, &token(number), answer)).1
    }

    fn pushed(&mut self, number: u32, grant: Grant) -> Vec<String> {
        self.after(|rooms, cx, _| rooms.deliver(cx, Push::Granted { token: token(number), grant })).1
    }

    fn leave_seat(&mut self, id: SeatId) -> (bool, Vec<String>) {
        self.after(|rooms, cx, name| rooms.leave_seat(cx, name, id).is_some())
    }
}

#[test]
fn many_tasks_have_one_place_in_the_queue() {
    let mut process = Process::new();
    assert_eq!(process.sit("first", None).1, ["ask 1 with None"]);
    assert_eq!(process.sit("second", None).1, [""; 0]);
    assert_eq!(process.answered(1, queued(7, 0)), [""; 0]);
    // A grant goes to the first task, and the second gets a place of its own at once.
    assert_eq!(process.pushed(1, grant(8, 900)), ["give 1 to first, Provisional", "ask 2 with None"]);
    // A second copy of the grant changes nothing.
    assert_eq!(process.pushed(1, grant(8, 900)), [""; 0]);
    assert_eq!(process.answered(2, Ok(Acquire::Granted(grant(9, 1_000)))), ["give 2 to second, Complete"]);
    assert!(process.rooms.is_idle());
}

#[test]
fn a_grant_waits_for_the_answer_to_a_request_in_flight() {
    let mut process = Process::new();
    process.sit("task", None);
    assert_eq!(process.pushed(1, grant(8, 900)), [""; 0], "the acquire could still put the token into the queue");
    assert_eq!(process.answered(1, queued_behind(7, 6)), ["give 1 to task, Provisional"]);

    // Without an answer it is unknown whether the acquire was carried out, so the token is given up.
    process.sit("task", None);
    process.pushed(2, grant(9, 900));
    let lost = Err(StoreErrorKind::NoAnswer.into());
    assert_eq!(process.answered(2, lost), ["leave 2, unanswered", "ask 3 with None"]);
}

/// The lock was taken away from the token before its acquire was carried out, which put the token into the queue again.
#[test]
fn a_grant_that_is_over_when_its_token_is_queued_again_is_not_believed() {
    for answer in [queued_behind(7, 9), queued(7, 0)] {
        let mut process = Process::new();
        let seat = process.sit("task", None).0;
        process.pushed(1, grant(8, 900));
        assert_eq!(process.answered(1, answer), ["ask 1 with Some(7)"], "only the store knows");
        assert_eq!(process.answered(1, queued_behind(7, 9)), [""; 0]);
        assert_eq!(process.leave_seat(seat), (true, vec!["leave 1".to_owned()]), "the queue forgets the token");
    }
}

#[test]
fn a_task_that_gets_up_is_dropped_outside_the_rooms() {
    let mut rooms = Rooms::default();
    let (policy, name) = (Process::new().policy, LockName::new("a").expect("a name"));
    let mut cx =
        Context { now: Moment::from_boot(Duration::ZERO), policy: &policy, may_resend: true, source: &mut Counter(0) };
    let ttl = Ttl::new(Duration::from_secs(30)).expect("a ttl");
    let task = std::rc::Rc::new(());
    let seat = Seat { ttl, owner: Owner::default(), retry_every: None, ticket: None, task: task.clone() };
    let id = rooms.sit(&mut cx, &name, seat);
    let returned = rooms.leave_seat(&mut cx, &name, id);
    assert_eq!(std::rc::Rc::strong_count(&task), 2, "the caller drops it");
    drop(returned);
    assert_eq!(std::rc::Rc::strong_count(&task), 1, "the rooms have kept nothing");
}

#[test]
fn the_last_task_that_gets_up_leaves_the_queue() {
    let mut process = Process::new();
    let first = process.sit("first", None).0;
    let second = process.sit("second", None).0;
    process.answered(1, queued(7, 0));
    assert_eq!(process.leave_seat(first), (true, vec![]));
    assert_eq!(process.leave_seat(first), (false, vec![]), "only once");
    assert_eq!(process.leave_seat(second), (true, vec!["leave 1".to_owned()]));
    // A grant that crossed the leave is passed on at once.
    assert_eq!(process.pushed(1, grant(8, 900)), ["hurry 1"]);
    assert!(!process.rooms.is_idle());
    process.rooms.left(&token(1));
    assert!(process.rooms.is_idle());
    assert_eq!(process.pushed(1, grant(8, 900)), [""; 0]);
}

#[test]
fn a_room_is_in_line_under_the_ticket_of_its_first_task() {
    let mut process = Process::new();
    assert_eq!(process.sit("younger", Some(20)).1, ["ask 1 with Some(20)"]);
    assert_eq!(process.sit("older", Some(10)).1, ["leave 1, unanswered", "ask 2 with Some(10)"]);
    process.answered(2, queued(10, 0));
    assert_eq!(process.pushed(2, grant(30, 900)), ["give 2 to older, Provisional", "ask 3 with Some(20)"]);
}

#[test]
fn a_late_grant_is_asked_for_again() {
    let mut process = Process::new();
    process.sit("task", None);
    process.answered(1, queued(7, 0));
    process.now_ms = 10_000;
    assert_eq!(process.pushed(1, grant(8, 8_100)), ["ask 1 with Some(7)"], "less than a quarter is left");
    assert_eq!(process.answered(1, Ok(Acquire::Granted(grant(8, 9_900)))), ["give 1 to task, Complete"]);
}

#[test]
fn a_lost_message_is_found_by_asking_again() {
    let mut process = Process::new();
    process.sit("task", None);
    process.answered(1, queued(7, 0));
    // The holder is unknown, so the room asks again at once.
    assert_eq!(process.rooms.wakes_at(), Some(Moment::from_boot(Duration::from_millis(1_001))));
    assert_eq!(process.after(|rooms, cx, _| rooms.tick(cx)).1, [""; 0], "not yet");
    process.now_ms = 1_001;
    assert_eq!(process.after(|rooms, cx, _| rooms.tick(cx)).1, ["ask 1 with Some(7)"]);
    assert_eq!(process.rooms.wakes_at(), None, "an answer is on its way");
}

#[test]
fn an_outage_that_is_too_long_fails_every_task() {
    let mut process = Process::new();
    process.sit("first", None);
    process.sit("second", None);
    process.after(|rooms, cx, _| rooms.deliver(cx, Push::Disconnected));
    process.now_ms = 10_999;
    assert_eq!(process.after(|rooms, cx, _| rooms.tick(cx)).1, [""; 0]);
    process.now_ms = 11_000;
    let failed = ["leave 1, unanswered", "fail first: Some(Unreachable)", "fail second: Some(Unreachable)"];
    assert_eq!(process.after(|rooms, cx, _| rooms.tick(cx)).1, failed);
}

#[test]
fn an_unanswered_token_is_not_used_again_where_its_request_may_still_run() {
    let mut process = Process::new();
    process.may_resend = false;
    process.sit("task", None);
    process.answered(1, queued(7, 0));
    process.now_ms = 1_001;
    process.after(|rooms, cx, _| rooms.tick(cx));
    // The next token keeps the place in the queue.
    let lost = Err(StoreErrorKind::NoAnswer.into());
    assert_eq!(process.answered(1, lost), ["leave 1, unanswered", "ask 2 with Some(7)"]);
}

#[test]
fn a_shutdown_turns_every_task_away() {
    let mut process = Process::new();
    process.sit("task", None);
    process.answered(1, queued(7, 0));
    assert_eq!(process.after(|rooms, cx, _| rooms.close(cx)).1, ["fail task: None", "leave 1"]);
    assert_eq!(process.sit("late", None).1, ["fail late: None"]);
}

#[test]
fn contention_is_remembered_once_and_for_a_second() {
    let mut process = Process::new();
    let at = |ms| Moment::from_boot(Duration::from_millis(ms));
    let name = process.name.clone();
    process.rooms.handed_on(at(0), &name);
    assert!(process.rooms.take_recent_contention(at(999), &name));
    assert!(!process.rooms.take_recent_contention(at(999), &name));
    process.rooms.handed_on(at(0), &name);
    assert!(!process.rooms.take_recent_contention(at(1_000), &name));
}
