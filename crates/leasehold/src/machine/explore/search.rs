//! Breadth first through every world that can be reached, and the way back to the first.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash, Hasher};

use super::rule::Violation;
use super::step::Step;
use super::world::{Setup, World};

/// What an exploration found.
pub(super) struct Found {
    pub(super) states: usize,
    pub(super) depth: usize,
    pub(super) violation: Option<(Violation, Vec<String>)>,
}

/// Explores until there is nothing new, or until the first violation: no shorter one exists.
pub(super) fn explore(setup: &Setup) -> Found {
    let mut seen = Seen::default();
    // The parent of each world, and the step from there.
    let mut links: Vec<(u32, Step)> = vec![(0, Step::Tick)];
    let first = World::new(setup);
    seen.insert(&first);
    let mut level = vec![(0_u32, first)];
    let mut depth = 0;
    loop {
        let mut next = Vec::new();
        for (place, world) in &level {
            for step in world.steps(setup) {
                let mut after = world.clone();
                let outcome = after.take(setup, step).and_then(|()| after.check(setup));
                let new = outcome.is_ok() && {
                    after.tidy(setup);
                    seen.insert(&after)
                };
                let outcome = outcome.and_then(|()| if new { after.ends_well(setup) } else { Ok(()) });
                if let Err(violation) = outcome {
                    let trace = trace(setup, &links, *place, step);
                    return Found { states: links.len(), depth: depth + 1, violation: Some((violation, trace)) };
                }
                if new {
                    next.push((u32::try_from(links.len()).expect("fits"), after));
                    links.push((*place, step));
                }
            }
        }
        if next.is_empty() {
            return Found { states: links.len(), depth, violation: None };
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
    let mut lines = Vec::new();
    for step in steps.into_iter().rev() {
        let what = world.words(step);
        // The last one fails: that is why we are here.
        let _ = world.take(setup, step);
        lines.push(format!("{what:<60} {}", world.summary()));
        world.tidy(setup);
    }
    lines
}

/// A set of worlds, each written down in a few dozen bytes one after the other.
#[derive(Default)]
struct Seen {
    bytes: Vec<u8>,
    /// Where each world ends.
    ends: Vec<usize>,
    /// Open addressing: number of a world + 1, or 0.
    table: Vec<u32>,
    scratch: Written,
}

impl Seen {
    /// Whether it is new.
    fn insert(&mut self, world: &World) -> bool {
        if self.table.len() < 2 * (self.ends.len() + 1) {
            self.grow();
        }
        let mut written = std::mem::take(&mut self.scratch);
        written.0.clear();
        world.hash(&mut written);
        let mut at = self.home(&written.0);
        let new = loop {
            match self.table[at] {
                0 => break true,
                n if self.world(n) == written.0 => break false,
                _ => at = (at + 1) % self.table.len(),
            }
        };
        if new {
            self.bytes.extend_from_slice(&written.0);
            self.ends.push(self.bytes.len());
            self.table[at] = u32::try_from(self.ends.len()).expect("fits");
        }
        self.scratch = written;
        new
    }

    fn world(&self, number: u32) -> &[u8] {
        let place = number as usize - 1;
        let start = if place == 0 { 0 } else { self.ends[place - 1] };
        &self.bytes[start..self.ends[place]]
    }

    fn home(&self, written: &[u8]) -> usize {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(written);
        usize::try_from(hash % self.table.len() as u64).expect("an index")
    }

    fn grow(&mut self) {
        self.table = vec![0; (self.table.len() * 2).max(1 << 12)];
        for number in 1..=u32::try_from(self.ends.len()).expect("fits") {
            let mut at = self.home(self.world(number));
            while self.table[at] != 0 {
                at = (at + 1) % self.table.len();
            }
            self.table[at] = number;
        }
    }
}

/// Writes down what is hashed: every number here is small, so that each takes one byte.
#[derive(Default)]
struct Written(Vec<u8>);

impl Written {
    fn small(&mut self, number: u64) {
        self.0.push(u8::try_from(number).expect("every number of a small world is small"));
    }
}

impl Hasher for Written {
    fn finish(&self) -> u64 {
        0
    }
    fn write(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }
    fn write_u8(&mut self, number: u8) {
        self.0.push(number);
    }
    fn write_u64(&mut self, number: u64) {
        self.small(number);
    }
    fn write_usize(&mut self, number: usize) {
        self.small(number as u64);
    }
    fn write_isize(&mut self, number: isize) {
        self.small(number.unsigned_abs() as u64);
    }
}
