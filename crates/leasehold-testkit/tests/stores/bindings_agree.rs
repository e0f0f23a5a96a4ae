//! The three stores give the same replies to the same requests for bindings.
//!
//! A failure prints a seed; `LEASEHOLD_AGREEMENT_SEED=<seed>` runs that sequence alone.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use leasehold::LockName;
use leasehold::bindings::{ClaimId, Retention};
use leasehold::store::{BindingId, BindingKind, Change, Expected, NewBinding, NodeSlot, SharedStore, Step};
use leasehold_testkit::{Arena, Kind, full_or};

const STEPS: usize = 80;
/// As large as real fences.
const FIRST_FENCE: u64 = 1_790_000_000_000_000;

/// Random numbers by seed (xorshift).
struct Dice(u64);

impl Dice {
    fn below(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }

    fn among<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        let at = self.below(all.len() as u64);
        &all[usize::try_from(at).expect("few")]
    }
}

/// Records of `once`, of this build and of one without fences, and values that are not records.
fn record(dice: &mut Dice, over: bool, fence: u64) -> Vec<u8> {
    let state = if !over { "running" } else { *dice.among(&["done", "unstored"]) };
    let text = match dice.below(8) {
        0 => format!("{{\"state\":\"{state}\",\"by\":\"a\",\"at_ms\":1}}\nold\n"),
        1 => "{\"state\":\"sleeping\"}\n".into(),
        2 => "[1]\n".into(),
        3 | 4 => {
            let payload = dice.among(&["p", "q"]);
            format!("{{\"state\":\"{state}\",\"by\":\"a\",\"at_ms\":1,\"fence\":{fence},\"payload\":\"{payload}\"}}\n")
        }
        _ => format!("{{\"state\":\"{state}\",\"by\":\"a\",\"at_ms\":1,\"fence\":{fence}}}\nresult"),
    };
    text.into_bytes()
}

fn name(text: String) -> LockName {
    LockName::new(text).expect("a name")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_three_stores_agree_about_bindings() {
    let arenas = [Arena::new(Kind::Memory).await, Arena::new(Kind::Sqlite).await, Arena::new(Kind::Redis).await];
    let mut stores = Vec::new();
    for arena in &arenas {
        stores.push(arena.store().await);
    }
    let given = std::env::var("LEASEHOLD_AGREEMENT_SEED").ok().map(|seed| seed.parse::<u64>().expect("a number"));
    let first = given.unwrap_or_else(|| RandomState::new().hash_one(0)) | 1;
    let many = if given.is_some() { 1 } else { full_or(40, 1_000_u64) };
    for n in 0..many {
        agree(&stores, first.wrapping_add(2 * n)).await;
    }
    println!("{many} sequences of {STEPS} steps");
}

async fn agree(stores: &[SharedStore], seed: u64) {
    let mut dice = Dice(seed);
    // Every sequence has ids and nodes of its own.
    let ids: Vec<BindingId> = [(BindingKind::Bindings, 0), (BindingKind::Results, 0), (BindingKind::Results, 1)]
        .map(|(kind, n)| BindingId { kind, id: name(format!("{seed} id:{n}")) })
        .into();
    let nodes = [name(format!("{seed} node")), name(format!("{seed} other"))];
    // A claim id belongs to one binding.
    let claims = [(); 3].map(|()| [(); 5].map(|()| ClaimId::random()));
    let keep = Retention::new(Duration::from_secs(600)).expect("a time");
    for step in 0..STEPS {
        let which = usize::try_from(dice.below(3)).expect("few");
        let (id, claim) = (&ids[which], dice.among(&claims[which]).clone());
        let (over, fence) = (dice.below(3) == 0, FIRST_FENCE + dice.below(4));
        let value = match dice.below(2) {
            0 => vec![u8::try_from(dice.below(256)).expect("a byte"); usize::try_from(dice.below(4)).expect("few")],
            _ => record(&mut dice, over, fence),
        };
        let mut answers = Vec::new();
        let what = dice.below(13);
        let said = match what {
            0..=2 => {
                let of = 1 + u32::try_from(dice.below(2)).expect("few");
                let slot = (dice.below(2) == 0).then(|| NodeSlot { node: dice.among(&nodes).clone(), of });
                let new = NewBinding { id: id.clone(), claim, keep, slot, value };
                for store in stores {
                    answers.push(format!("{:?}", store.create(&new).await));
                }
                format!("{new:?}")
            }
            3 | 4 => {
                let expected = match dice.below(3) {
                    0 => Expected::Any,
                    1 => Expected::Claim(claim),
                    _ => Expected::Unchanged(claim, dice.below(3)),
                };
                let change =
                    Change { value, keep: (dice.below(2) == 0).then_some(keep), give_slot_back: dice.below(3) == 0 };
                for store in stores {
                    answers.push(format!("{:?}", store.change(id, &expected, &change).await));
                }
                format!("{id:?} {expected:?} {change:?}")
            }
            5 => {
                for store in stores {
                    answers.push(format!("{:?}", store.remove(id, &claim).await));
                }
                format!("remove {id:?} {claim}")
            }
            6..=9 => {
                let value = record(&mut dice, over, fence);
                let step = Step { id: id.clone(), claim, fence, over, keep, value };
                for store in stores {
                    answers.push(format!("{:?}", store.advance(&step).await));
                }
                format!("{step:?}")
            }
            10 => {
                for store in stores {
                    answers.push(format!("{:?}", store.withdraw(id, &claim).await));
                }
                format!("withdraw {id:?} {claim}")
            }
            _ => String::from("look"),
        };
        // The stored values agree too.
        for id in &ids {
            for (n, store) in stores.iter().enumerate() {
                let found = store.read(id).await.expect("an answer").map(|(bound, _)| (bound.clone(), bound.value));
                let found = format!("{found:?}");
                if answers.len() <= n { answers.push(found) } else { answers[n] += &found }
            }
        }
        assert!(
            answers.iter().all(|answer| *answer == answers[0]),
            "step {step}, {said}:\nmemory {}\nsqlite {}\nredis {}\nLEASEHOLD_AGREEMENT_SEED={seed} shows it again",
            answers[0],
            answers[1],
            answers[2]
        );
    }
}
