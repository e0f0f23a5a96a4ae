//! The RESP3 client of the Redis store.
//!
//! | file | contents |
//! |---|---|
//! | `address` | parses `redis://` and `rediss://` URLs |
//! | `socket`, `tls` | the byte stream to the server, plain or encrypted, and the TLS handshake |
//! | `connection` | requests, replies and pushes on one stream, in order |
//! | `resp` | writes commands, parses values |
//! | `reply` | reads replies: error codes, words, numbers, lists |
//! | `session` | the handshake on a new connection, commands and scripts |
//! | `reconnect` | replaces a broken session with a new one |
//! | `bare` | a connection without a store, for the benchmark |
//!
//! # Why not the `redis` crate
//!
//! Two of the following are not possible with it (stamped pushes and oversized strings), and the others would have to be
//! built around it. `cargo xtask bench` measures both clients in the same run: its rows with `ours / redis` have the
//! ratios, for the versions of the crate in `bench/Cargo.lock`.
//!
//! - **Few writes.** Tasks append their requests to one buffer, and one I/O task writes it. Requests of many tasks
//!   leave in one write, and a task that is alone writes its request itself. The crate sends every request through a
//!   channel to its I/O task, with another channel for the reply and a timer. This client keeps one timer per
//!   connection, for the oldest unanswered request.
//! - **Stamped pushes.** A pushed grant has to count from a moment before its lease began. Replies and pushes share one
//!   ordered stream, so a push was written after every command whose reply was read before it. The send time of the
//!   newest such command is that moment. [`PushHandler`] sees replies and pushes in stream order.
//! - **A known end of the previous connection.** The handshake sends `CLIENT KILL` for the previous connection before
//!   anything is asked again. A command that the previous connection sent can then no longer run after its retry. Where
//!   the server does not permit that, [`RedisClient::can_kill`] says so.
//! - **Oversized strings.** Another client may write a value of many megabytes at a lock's key. The content of such a
//!   string is dropped while it is read, and a short text takes its place.
//!
//! # What the client must never do
//!
//! - It never sends a command twice after an error or a timeout: every unanswered request fails, and the caller
//!   decides. The one repetition is a script that the server does not have (`NOSCRIPT`, so it did not run), which is
//!   sent whole.
//! - It never delivers a push with the stamp of another connection: each session has its own inbox.
//! - It never reorders replies and pushes, and never holds a complete reply back.
//! - It never uses a connection after the first failure on it: an I/O error, a late reply, an unreadable byte, or a
//!   reply that only a replica gives. Replies are matched by order alone, so a late one could reach the wrong request.
//! - It never sends anything of a lock before the server has accepted the login and the database.
//! - It never logs a secret: [`Address`] is displayed without its login, requests are not logged, and of a reply only the
//!   text of an error is. The error of a server that does not know HELLO may repeat the login, so it is replaced.

mod address;
#[cfg(feature = "test-hooks")]
mod bare;
mod connection;
mod reconnect;
mod reply;
mod resp;
mod session;
mod socket;
#[cfg(feature = "tls")]
mod tls;

pub(super) use address::Address;
#[cfg(feature = "test-hooks")]
pub use bare::BareClient;
pub(super) use connection::{Connection, PushHandler};
pub(super) use reconnect::{ConnectionState, RedisClient};
pub(super) use reply::{fence, from_server, items, number, text, unexpected_reply, word};
pub(super) use resp::{Cmd, OVERSIZED, Pipeline, Value, cmd};
pub(super) use session::{Session, SessionReply, is_replica, open_connection, replica};
