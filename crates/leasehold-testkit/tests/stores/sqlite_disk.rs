//! The SQLite store on a full disk, on a read-only one, and afterwards.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use leasehold::lease::{Token, Ttl};
use leasehold::store::sqlite::SqliteStore;
use leasehold::store::*;
use leasehold::{LockName, Owner};

/// A small filesystem that is unmounted on drop.
struct Disk(PathBuf, #[expect(dead_code, reason = "removed after the unmount")] tempfile::TempDir);

impl Disk {
    /// Returns `None` and prints the reason if this user may not mount.
    fn mount(size: &str) -> Option<Self> {
        let dir = tempfile::tempdir().expect("a directory");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(dir.path());
        let mounted = mount.output().is_ok_and(|out| out.status.success());
        if !mounted {
            println!("skipped: mounting a tmpfs needs root");
            return None;
        }
        Some(Self(dir.path().to_owned(), dir))
    }

    fn remount(&self, options: &str) {
        let done = Command::new("mount").args(["-o", &format!("remount,{options}")]).arg(&self.0).status();
        assert!(done.expect("mount runs").success());
    }

    /// Fills the disk.
    fn fill(&self) {
        let mut file = File::create(self.0.join("filler")).expect("creates");
        let mut size = 1 << 16;
        while size > 0 {
            if file.write_all(&vec![7_u8; size]).is_err() {
                size /= 2;
            }
        }
    }

    fn empty(&self) {
        std::fs::remove_file(self.0.join("filler")).expect("removes");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn claim(text: &str) -> AcquireRequest {
    AcquireRequest {
        name: LockName::new(text).expect("valid"),
        token: Token::random(),
        ttl: Ttl::new(Duration::from_secs(600)).expect("valid"),
        owner: Owner::default(),
        fenced: true,
        listens: true,
        since_ms: 1,
    }
}

fn open(path: &Path) -> SqliteStore {
    SqliteStore::open(&path.join("locks.db")).expect("opens")
}

/// Acquires locks until the store returns an error. Returns the locks and the error.
async fn take_until_refused(store: &SqliteStore, prefix: &str) -> (Vec<AcquireRequest>, Option<StoreError>) {
    let mut taken = Vec::new();
    for i in 0..20_000 {
        let claim = claim(&format!("{prefix}:{i}"));
        match store.try_acquire(&claim).await {
            Ok(Try::Granted(_)) => taken.push(claim),
            Ok(other) => panic!("{other:?}"),
            Err(error) => return (taken, Some(error)),
        }
    }
    (taken, None)
}

#[tokio::test]
async fn every_release_works_on_a_full_disk_and_all_works_after_it() {
    let Some(disk) = Disk::mount("2m") else { return };
    let (one, two) = (open(&disk.0), open(&disk.0));
    let mut held = Vec::new();
    for i in 0..300 {
        let claim = claim(&format!("before:{i}"));
        assert!(matches!(one.try_acquire(&claim).await, Ok(Try::Granted(_))));
        held.push(claim);
    }
    // Some have a waiter, so their release writes more than one row.
    let mut pushes = two.pushes();
    for claim_held in &held[..20] {
        let waiter = AcquireRequest { name: claim_held.name.clone(), ..claim("x") };
        assert!(matches!(two.acquire(&waiter, None).await, Ok(Acquire::Queued(_))));
    }
    disk.fill();
    let (more, refusal) = take_until_refused(&one, "full").await;
    println!("{} more locks on the full disk", more.len());
    assert_eq!(refusal.map(|e| e.kind()), Some(StoreErrorKind::DiskFull));
    let there = one.long_held(None, usize::MAX).await.expect("answers").locks.len();
    assert_eq!(there, held.len() + more.len(), "what was granted is there");
    let (last, refusal) = take_until_refused(&two, &"a long name ".repeat(30)).await;
    assert_eq!(refusal.map(|e| e.kind()), Some(StoreErrorKind::DiskFull));
    for claim in &last {
        assert_eq!(two.release(&claim.name, &claim.token).await, Ok(Release::Released));
    }

    for claim in held.iter().chain(&more) {
        assert_eq!(one.release(&claim.name, &claim.token).await, Ok(Release::Released), "{:?}", claim.name);
    }
    let mut handed = 0;
    while handed < 20 {
        let push = tokio::time::timeout(Duration::from_secs(5), pushes.recv()).await.expect("in time");
        handed += usize::from(matches!(push, Some(Push::Granted { .. })));
    }
    // Released locks can be acquired again, more often than the log alone would allow.
    for _ in 0..3_000 {
        let claim = AcquireRequest { name: held[50].name.clone(), ..claim("x") };
        assert!(matches!(one.try_acquire(&claim).await, Ok(Try::Granted(_))));
        assert_eq!(one.release(&claim.name, &claim.token).await, Ok(Release::Released));
    }
    assert_eq!(one.integrity().await, Ok("ok".into()));

    disk.empty();
    // The log alone may take 4 MB.
    disk.remount("size=16m");
    let (after, _) = take_until_refused(&two, "after").await;
    assert!(after.len() > more.len() + 500, "only {} locks with room again", after.len());
    for claim in &after {
        assert_eq!(two.release(&claim.name, &claim.token).await, Ok(Release::Released));
    }
    assert_eq!(two.integrity().await, Ok("ok".into()));
}

#[tokio::test]
async fn releases_work_when_the_locks_themselves_filled_the_disk() {
    let Some(disk) = Disk::mount("1m") else { return };
    let store = open(&disk.0);
    let (taken, refusal) = take_until_refused(&store, "k").await;
    println!("{} locks on 1 MB", taken.len());
    assert_eq!(
        store.long_held(None, usize::MAX).await.expect("answers").locks.len(),
        taken.len(),
        "what was granted is there"
    );
    assert_eq!(refusal.map(|e| e.kind()), Some(StoreErrorKind::DiskFull));
    for claim in &taken {
        assert_eq!(store.release(&claim.name, &claim.token).await, Ok(Release::Released));
    }
    assert_eq!(store.integrity().await, Ok("ok".into()));
}

#[test]
fn opening_distinguishes_a_full_from_a_read_only_disk() {
    let Some(disk) = Disk::mount("1m") else { return };
    disk.fill();
    let refusal = SqliteStore::open(&disk.0.join("locks.db")).err().expect("refused");
    assert!(matches!(refusal.kind(), StoreErrorKind::DiskFull | StoreErrorKind::File), "{refusal}");
    disk.remount("ro");
    let refusal = SqliteStore::open(&disk.0.join("other.db")).err().expect("refused");
    assert_eq!(refusal.kind(), StoreErrorKind::File, "{refusal}");
    assert!(refusal.to_string().contains("Read-only file system"), "{refusal}");
}
