//! Every part of the kit shown to do what it says, against a real server where there is one.

mod kit {
    mod board;
    mod history;
    mod proxy;
    mod server;
    mod worker;
}
