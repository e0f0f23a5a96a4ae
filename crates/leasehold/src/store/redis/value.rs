//! The value of a held lock: `lh1 <flag> <token> <fence16> <inbox> <since_ms> <ttl_ms> <owner…>`.

use std::time::Duration;

use super::client::{Cmd, OVERSIZED, cmd};
use crate::facts::{Fence, Owner, Token};
use crate::store::{AcquireRequest, Holder, VALUE_BYTES_MAX};

/// The inbox of a holder that receives no messages, or of a waiter that polls.
pub(super) const NO_INBOX: &str = "-";

/// Longest value that is parsed, in bytes; values of ours are far shorter. A server closes a subscribed connection that
/// leaves tens of megabytes unread, so a longer value is never requested as a whole.
pub(super) const SEEN_MAX: usize = 64 * 1024;

/// The longest stored binding, in bytes: the longest value, and more than the other fields can take. Another client
/// wrote a longer text. It is never read as a whole, because the server closes a subscribed connection that leaves tens
/// of megabytes unread.
pub(super) const STORED_MAX: usize = VALUE_BYTES_MAX + 1024;

/// The command that reads a value, cut to one byte more than [`SEEN_MAX`].
pub(super) fn read_command(key: &str) -> Cmd {
    let mut read = cmd("GETRANGE");
    read.arg(key).arg(0_u64).arg(SEEN_MAX);
    read
}

/// A parsed value of a lock's key.
pub(super) struct HolderRecord<'a> {
    pub(super) token: Token,
    pub(super) fence: Option<Fence>,
    flag: u8,
    inbox: &'a str,
    since_ms: u64,
    ttl_ms: u64,
    owner: &'a str,
}

/// The value that a try writes. The fence is not known yet, so its digits are zeros.
pub(super) fn written(request: &AcquireRequest, inbox: &str, since_ms: u64) -> String {
    let (token, ttl) = (request.token.reveal(), request.ttl.as_millis());
    format!("lh1 0 {token} 0000000000000000 {inbox} {since_ms} {ttl} {}", request.owner.wire())
}

impl<'a> HolderRecord<'a> {
    /// Parses a value; `None` if another kind of client wrote it.
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

impl HolderRecord<'_> {
    /// Whether the lease was revoked.
    pub(super) fn is_revoked(&self) -> bool {
        self.flag == b'R'
    }
}

/// Reads the holder from the value at a lock's key. `ms_left` is the reply to PTTL: negative without expiry.
pub(super) fn holder(value: &[u8], ms_left: i64) -> Holder {
    let ttl_left = u64::try_from(ms_left).ok().map(Duration::from_millis);
    let Some(record) = HolderRecord::parse(value) else {
        let shown = if value.len() > SEEN_MAX { OVERSIZED.as_bytes() } else { value };
        return Holder::foreign(shown, ttl_left);
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

/// The inbox channel in a value; `None` if its writer receives no messages.
pub(super) fn inbox(value: &[u8]) -> Option<&str> {
    HolderRecord::parse(value).map(|record| record.inbox).filter(|inbox| *inbox != NO_INBOX)
}

/// Parses digits only: `parse` alone would accept a sign.
fn number(digits: &str) -> Option<u64> {
    digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{HolderId, LockName, Ttl};

    fn request() -> AcquireRequest {
        AcquireRequest {
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
        let request = request();
        let holder = holder(written(&request, "lh1:inbox:x", 77).as_bytes(), 1_500);
        assert_eq!(holder.id, request.token.holder_id());
        assert_eq!(holder.owner, request.owner);
        assert_eq!((holder.fence, holder.since_ms, holder.listens), (None, 77, true));
        assert_eq!(holder.ttl_left, Some(Duration::from_millis(1_500)));
        assert!(!holder.foreign && !holder.revoked);
    }

    #[test]
    fn anything_else_is_foreign() {
        let ours = written(&request(), "-", 77);
        for value in ["", "x", "lh1", "lh2 0 a", &ours.replacen('0', "9", 1), &ours.replacen(" 77", " +7", 1)] {
            let holder = holder(value.as_bytes(), -1);
            assert!(holder.foreign && holder.ttl_left.is_none(), "{value}");
            assert_eq!(holder.id, HolderId::of(value.as_bytes()));
        }
        assert!(holder(&[0xff, 0xfe], 5).foreign);
    }
}
