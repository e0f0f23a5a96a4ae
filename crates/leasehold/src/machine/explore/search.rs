//! Breadth first through every world that can be reached, and the way back to the first.

use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};

use super::rule::Violation;
use super::step::Step;
use super::world::{Setup, World};
use crate::rules::Without;

/// What an exploration found.
pub(super) struct Found {
    pub(super) states: usize,
    pub(super) depth: usize,
    /// Whether there are more states than the setup allows.
    pub(super) more: bool,
    pub(super) violation: Option<(Violation, Vec<String>)>,
}

/// Explores until there is nothing new, or too much, or until the first violation: no shorter one exists.
pub(super) fn explore(setup: &Setup) -> Found {
    let _without = Without::new(setup.without);
    let mut seen = Seen::default();
    let mut text = Vec::new();
    // The parent of each world, and the step from there.
    let mut links: Vec<(u32, Step)> = vec![(0, Step::Tick)];
    let mut first = World::new(setup);
    first.tidy(setup, &mut text);
    seen.insert(&text);
    let mut level = vec![(0_u32, first)];
    let mut depth = 0;
    loop {
        let mut next = Vec::new();
        for (place, world) in &level {
            for step in world.steps(setup) {
                let mut after = world.clone();
                let outcome = after.take(setup, step).and_then(|()| after.check(setup));
                let new = outcome.is_ok() && {
                    after.tidy(setup, &mut text);
                    seen.insert(&text)
                };
                let outcome = outcome.and_then(|()| if new { after.ends_well(setup) } else { Ok(()) });
                if let Err(violation) = outcome {
                    let trace = trace(setup, &links, *place, step);
                    return Found {
                        states: links.len(),
                        depth: depth + 1,
                        more: false,
                        violation: Some((violation, trace)),
                    };
                }
                if new {
                    next.push((u32::try_from(links.len()).expect("fits"), after));
                    links.push((*place, step));
                }
            }
        }
        if next.is_empty() || links.len() >= setup.most_states {
            return Found { states: links.len(), depth, more: !next.is_empty(), violation: None };
        }
        depth += 1;
        level = next;
    }
}

/// The steps that lead to a world and the one after, in words.
fn trace(setup: &Setup, links: &[(u32, Step)], mut place: u32, last: Step) -> Vec<String> {
    let mut steps = vec![last];
    while place != 0 {
        let (parent, step) = links[place as usize];
        steps.push(step);
        place = parent;
    }
    let mut world = World::new(setup);
    let mut text = Vec::new();
    world.tidy(setup, &mut text);
    let mut lines = Vec::new();
    for step in steps.into_iter().rev() {
        let what = world.words(step);
        // The last one fails: that is why we are here.
        let _ = world.take(setup, step);
        lines.push(format!("{what:<60} {}", world.summary()));
        world.tidy(setup, &mut text);
    }
    lines
}

/// A set of worlds. Of each text it keeps 128 bits of a hash: among a billion worlds, the chance that two different ones
/// look equal is below one in 10²⁰.
#[derive(Default)]
struct Seen(HashSet<u128, BuildHasherDefault<Folded>>);

impl Seen {
    /// Whether the world is new.
    fn insert(&mut self, text: &[u8]) -> bool {
        self.0
            .insert(u128::from(hash(text, 0x9e37_79b9_7f4a_7c15)) << 64 | u128::from(hash(text, 0xd1b5_4a32_d192_ed03)))
    }
}

/// Multiplies each eight bytes with what came before, and keeps both halves of the product.
fn hash(text: &[u8], seed: u64) -> u64 {
    let mix = |a: u64, b: u64| {
        let product = u128::from(a ^ seed) * u128::from(b ^ 0xa076_1d64_78bd_642f);
        low(product) ^ low(product >> 64)
    };
    let mut state = seed ^ text.len() as u64;
    for chunk in text.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        state = mix(state.rotate_left(29), u64::from_le_bytes(word));
    }
    mix(state, seed.rotate_left(17))
}

fn low(number: u128) -> u64 {
    u64::from_le_bytes(number.to_le_bytes()[..8].try_into().expect("eight bytes"))
}

/// What is hashed is a hash already.
#[derive(Default)]
struct Folded(u64);

impl Hasher for Folded {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, _: &[u8]) {
        unreachable!("only 128-bit numbers are hashed");
    }
    fn write_u128(&mut self, number: u128) {
        self.0 = low(number);
    }
}
