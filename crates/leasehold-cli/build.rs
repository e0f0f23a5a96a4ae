//! Links the unwinder into the program where the compiler has it as a static library. `leasehold run` starts this program
//! three times, and each start is shorter by the loading of one shared library.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let target = |what: &str| env::var(format!("CARGO_CFG_TARGET_{what}")).unwrap_or_default();
    let native = env::var("HOST") == env::var("TARGET");
    if native && target("OS") == "linux" && target("ENV") == "gnu" && has_static_unwinder() {
        println!("cargo:rustc-link-lib=static:-bundle=gcc_eh");
    }
}

/// The compiler answers with a path where it has the library, and with the bare name where it has not.
fn has_static_unwinder() -> bool {
    let answer = Command::new("cc").arg("-print-file-name=libgcc_eh.a").output();
    answer.is_ok_and(|answer| Path::new(String::from_utf8_lossy(&answer.stdout).trim()).is_absolute())
}
