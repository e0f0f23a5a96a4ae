//! The command as people use it: every verb, every exit code, at a terminal and in scripts.

mod alerting;
mod common;
mod config;
mod crowds;
mod demo;
mod gpu;
mod health;
mod load;
mod looking;
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
mod taking_away;
mod wrong_use;
