//! Every part of the kit shown to do what it says, against a real server.

mod kit {
    mod server;
}
