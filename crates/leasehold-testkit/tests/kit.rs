//! Tests of the test kit, with a real server where one is needed.

mod kit {
    mod board;
    mod history;
    mod proxy;
    mod server;
    mod worker;
}
