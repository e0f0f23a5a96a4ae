//! The attempts of this process that wait in queues.

use std::collections::{BTreeMap, HashSet};

use super::row::Key;
use crate::facts::Token;
use crate::store::on_machine::Asking;

/// A try or an acquire of one lock.
#[derive(Clone)]
pub(super) struct AcquireCall {
    pub(super) name: Key,
    pub(super) asking: Asking,
}

/// The attempts of this process that wait, with their tickets.
#[derive(Default)]
pub(super) struct LocalWaiters {
    pub(super) places: BTreeMap<(Token, Key), (AcquireCall, u64)>,
    /// The attempts whose holder has to be checked again.
    pub(super) unchecked: HashSet<(Token, Key)>,
}

impl LocalWaiters {
    pub(super) fn insert(&mut self, call: &AcquireCall, ticket: u64) {
        let key = (call.asking.contender.token.clone(), call.name.clone());
        self.unchecked.insert(key.clone());
        self.places.insert(key, (call.clone(), ticket));
    }

    /// Removes an attempt. Returns whether it waited.
    pub(super) fn remove(&mut self, name: &Key, token: &Token) -> bool {
        if self.places.is_empty() {
            return false;
        }
        let key = (token.clone(), name.clone());
        self.unchecked.remove(&key);
        self.places.remove(&key).is_some()
    }

    /// Removes a token that was granted a lock. The message does not name the lock, so every place of the token is
    /// removed; an attempt that still waits sends its request again.
    pub(super) fn granted(&mut self, token: &Token) {
        self.places.retain(|(t, _), _| t != token);
        self.unchecked.retain(|(t, _)| t != token);
    }

    /// Removes all attempts and returns their tokens. Each attempt sends its request again by itself.
    pub(super) fn take_tokens(&mut self) -> Vec<Token> {
        self.unchecked.clear();
        let mut tokens: Vec<Token> = std::mem::take(&mut self.places).into_keys().map(|(token, _)| token).collect();
        tokens.dedup();
        tokens
    }

    /// Marks the attempts of a token whose lock changed hands, because they are next.
    pub(super) fn recheck(&mut self, token: &Token) {
        self.unchecked.extend(self.places.keys().filter(|(t, _)| t == token).cloned());
    }
}
