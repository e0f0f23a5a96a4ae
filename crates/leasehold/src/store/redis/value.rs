//! The value of a held lock: `lh1 <flag> <token> <fence16> <inbox> <since_ms> <ttl_ms> <owner…>`.

use std::time::Duration;

use super::resp::{Cmd, cmd};
use crate::facts::{Fence, Owner, Token};
use crate::store::{Claim, Holder};

/// Inbox of a holder that cannot be told anything, or of a waiter that polls.
pub(super) const NO_INBOX: &str = "-";

/// As much of a value as is looked at; ours are shorter by far. A server closes a connection with a subscription that
/// leaves tens of megabytes unread, so a longer value is never asked for as a whole.
pub(super) const SEEN_MAX: usize = 64 * 1024;

/// What stands for a value that is longer than [`SEEN_MAX`]: nothing we write, and the same for every client
/// (`clipped` in `head.lua`).
pub(super) const TOO_LONG: &str = "(a value of more than 65536 bytes)";

/// Reads as much of a value as is looked at, and a byte more where it is longer.
pub(super) fn read_command(key: &str) -> Cmd {
    let mut read = cmd("GETRANGE");
    read.arg(key).arg(0_u64).arg(SEEN_MAX);
    read
}

/// A value as it stands at a lock's key.
pub(super) struct Record<'a> {
    pub(super) token: Token,
    pub(super) fence: Option<Fence>,
    flag: u8,
    inbox: &'a str,
    since_ms: u64,
    ttl_ms: u64,
    owner: &'a str,
}

/// What a try writes. The fence is not known yet: zeros.
pub(super) fn written(claim: &Claim, inbox: &str, since_ms: u64) -> String {
    let (token, ttl) = (claim.token.reveal(), claim.ttl.as_millis());
    format!("lh1 0 {token} 0000000000000000 {inbox} {since_ms} {ttl} {}", claim.owner.wire())
}

impl<'a> Record<'a> {
    /// `None`: another kind of client wrote it.
    pub(super) fn parse(value: &'a [u8]) -> Option<Self> {
        if value.len() > SEEN_MAX {
            return None;
        }
        let mut parts = std::str::from_utf8(value).ok()?.splitn(8, ' ');
        let mut next = || parts.next();
        if next()? != "lh1" {
            return None;
        }
        let flag = next().filter(|f| matches!(*f, "0" | "1" | "R"))?.as_bytes()[0];
        let token = Token::parse(next()?).ok()?;
        let digits = next().filter(|d| d.len() == 16)?;
        let fence = Some(number(digits)?).filter(|f| *f != 0).map(Fence::new);
        let inbox = next().filter(|i| !i.is_empty())?;
        Some(Self { token, fence, flag, inbox, since_ms: number(next()?)?, ttl_ms: number(next()?)?, owner: next()? })
    }
}

impl Record<'_> {
    /// Whether the lease was revoked.
    pub(super) fn is_revoked(&self) -> bool {
        self.flag == b'R'
    }
}

/// Who wrote a value found at a lock's key. `ms_left` as PTTL answers: negative for no expiry.
pub(super) fn holder(value: &[u8], ms_left: i64) -> Holder {
    let ttl_left = u64::try_from(ms_left).ok().map(Duration::from_millis);
    let Some(record) = Record::parse(value) else {
        let told = if value.len() > SEEN_MAX { TOO_LONG.as_bytes() } else { value };
        return Holder::foreign(told, ttl_left);
    };
    Holder {
        id: record.token.holder_id(),
        owner: Owner::from_wire(record.owner),
        fence: record.fence,
        since_ms: record.since_ms,
        ttl: Some(Duration::from_millis(record.ttl_ms)),
        ttl_left,
        revoked: record.is_revoked(),
        foreign: false,
        listens: record.inbox != NO_INBOX,
        connected: None,
    }
}

/// Where whoever wrote a value can be told something.
pub(super) fn inbox(value: &[u8]) -> Option<&str> {
    Record::parse(value).map(|record| record.inbox).filter(|inbox| *inbox != NO_INBOX)
}

/// Digits only: `parse` alone would take a sign.
fn number(digits: &str) -> Option<u64> {
    digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{HolderId, LockName, Ttl};

    fn claim() -> Claim {
        Claim {
            name: LockName::new("a").expect("valid"),
            token: Token::random(),
            ttl: Ttl::default(),
            owner: Owner::named("nightly report").expect("valid"),
            fenced: true,
            listens: true,
            since_ms: 1,
        }
    }

    #[test]
    fn reads_what_it_wrote() {
        let claim = claim();
        let holder = holder(written(&claim, "lh1:inbox:x", 77).as_bytes(), 1_500);
        assert_eq!(holder.id, claim.token.holder_id());
        assert_eq!(holder.owner, claim.owner);
        assert_eq!((holder.fence, holder.since_ms, holder.listens), (None, 77, true));
        assert_eq!(holder.ttl_left, Some(Duration::from_millis(1_500)));
        assert!(!holder.foreign && !holder.revoked);
    }

    #[test]
    fn anything_else_is_foreign() {
        let ours = written(&claim(), "-", 77);
        for value in ["", "x", "lh1", "lh2 0 a", &ours.replacen('0', "9", 1), &ours.replacen(" 77", " +7", 1)] {
            let holder = holder(value.as_bytes(), -1);
            assert!(holder.foreign && holder.ttl_left.is_none(), "{value}");
            assert_eq!(holder.id, HolderId::of(value.as_bytes()));
        }
        assert!(holder(&[0xff, 0xfe], 5).foreign);
    }
}
