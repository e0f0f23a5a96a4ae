//! Every state of small worlds.
