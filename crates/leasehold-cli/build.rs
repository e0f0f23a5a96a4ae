//! Links the program so that it starts fast: `leasehold run` executes it three times.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let target = |what: &str| env::var(format!("CARGO_CFG_TARGET_{what}")).unwrap_or_default();
    if target("OS") != "linux" || target("ENV") != "gnu" || target("FEATURE").split(',').any(|it| it == "crt-static") {
        return;
    }
    // At a fixed address the program needs no relocation: the loader neither rewrites nor copies its 64 pages of
    // pointers at each start. Stack, heap and shared libraries keep their random addresses.
    println!("cargo:rustc-link-arg-bins=-no-pie");
    // The unwinder as a static library is one shared library less to load.
    if env::var("HOST") == env::var("TARGET") && has_static_unwinder() {
        println!("cargo:rustc-link-lib=static:-bundle=gcc_eh");
    }
}

/// Asks the C compiler, which answers with a path if it has the library, and with the bare name if not.
fn has_static_unwinder() -> bool {
    let answer = Command::new("cc").arg("-print-file-name=libgcc_eh.a").output();
    answer.is_ok_and(|answer| Path::new(String::from_utf8_lossy(&answer.stdout).trim()).is_absolute())
}
