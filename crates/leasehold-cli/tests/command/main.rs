//! Black-box tests of the command.

mod alerting;
mod common;
mod config;
mod crowds;
mod demo;
mod evict;
mod gpu;
mod health;
mod inspect;
mod load;
mod once;
mod run_exit;
mod run_guarded;
mod run_killed;
mod run_lost;
mod run_many;
mod run_support;
mod run_terminal;
mod scripts;
mod serve;
mod wrong_use;
