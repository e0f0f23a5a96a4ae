//! The compiler's messages for wrong uses of the attributes. After a change of the messages, run
//! `UI=overwrite cargo test -p leasehold-macros --test ui` and read the difference.
//!
//! The compiler is called directly, with the library that was built for this test. A Cargo project for the cases would build
//! every dependency again, which takes longer than all other tests together.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn mistakes_are_reported_at_their_position() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = library();
    let mut cases: Vec<PathBuf> = files(&package.join("tests/ui"));
    cases.retain(|path| path.extension().is_some_and(|ending| ending == "rs"));
    cases.sort();
    assert!(cases.len() >= 10, "{cases:?}");
    let mut wrong = Vec::new();
    for case in cases {
        let messages = messages(case.strip_prefix(package).expect("inside"), package, &library);
        let expected = case.with_extension("stderr");
        if std::env::var_os("UI").is_some_and(|wish| wish == "overwrite") {
            fs::write(&expected, &messages).expect("written");
        } else if fs::read_to_string(&expected).unwrap_or_default() != messages {
            wrong.push(format!("{} differs from the compiler's messages:\n{messages}", expected.display()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Returns the compiler's messages for a file that must not compile.
fn messages(case: &Path, package: &Path, library: &Path) -> String {
    let out = tempfile::tempdir().expect("a temporary directory");
    let compiled = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .current_dir(package)
        .args(["--edition=2024", "--crate-type=bin", "--emit=metadata", "--color=never", "--out-dir"])
        .arg(out.path())
        .arg(format!("-Ldependency={}", library.parent().expect("a directory").display()))
        .arg(format!("--extern=leasehold={}", library.display()))
        .arg(case)
        .output()
        .expect("the compiler starts");
    assert!(!compiled.status.success(), "{} compiles", case.display());
    let messages = String::from_utf8(compiled.stderr).expect("text");
    // The compiler's summary is omitted.
    let summary = ["error: aborting due to", "For more information about", "Some errors have detailed"];
    let lines = messages.lines().filter(|line| !summary.iter().any(|start| line.starts_with(start)));
    // Line numbers of the library change often.
    let place = |line: &str| match line.split_once(".rs:") {
        Some((file, _)) if file.contains("--> crates/") => format!("{file}.rs"),
        _ => line.to_owned(),
    };
    lines.map(place).collect::<Vec<_>>().join("\n").trim_end().to_owned() + "\n"
}

/// Returns the newest build of the library.
fn library() -> PathBuf {
    let this = std::env::current_exe().expect("this test");
    let built = files(this.parent().expect("a directory")).into_iter().filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libleasehold-") && name.ends_with(".rlib")
    });
    let made = |path: &PathBuf| path.metadata().and_then(|about| about.modified()).ok();
    built.max_by_key(made).expect("the library was built for this test")
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).expect("a directory");
    entries.map(|entry| entry.expect("an entry").path()).collect()
}
