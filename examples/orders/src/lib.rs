//! One order is paid by one request at a time, however many instances of this service there are.
//!
//! ```text
//! cargo run --release -p orders
//! curl -X POST localhost:3000/orders/7/pay & curl -X POST localhost:3000/orders/7/pay
//! ```
//!
//! One of the two is answered with 200, the other at once with 409. `docs/one-order-at-a-time.md` walks
//! through it.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::{Path, State};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use leasehold::http::LockLayer;
use leasehold::lease::Invalid;
use leasehold::{Error, LockManager, lock};
use serde::Serialize;

/// What every handler has at hand.
#[derive(Clone)]
pub struct Shop {
    locks: LockManager,
    bank: Bank,
    orders: Arc<Mutex<HashMap<u64, Order>>>,
}

/// Moves the money of an order, and takes its time.
pub type Bank = Arc<dyn Fn(u64) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// An order.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Order {
    /// How often it was paid.
    pub payments: u32,
    /// The fence of the last payment: what a database would compare before it writes.
    pub fence: Option<u64>,
}

impl Shop {
    /// A shop with these locks and this bank.
    pub fn new(locks: LockManager, bank: Bank) -> Self {
        Self { locks, bank, orders: Arc::default() }
    }

    /// Its routes.
    ///
    /// # Errors
    /// When the key of the carts' lock makes no sense.
    pub fn routes(self) -> Result<Router, Invalid> {
        let one_at_a_time = LockLayer::new(self.locks.clone(), "cart:{cart_id}")?.wait_up_to(Duration::from_secs(2));
        let carts = Router::new().route("/carts/{cart_id}", put(save_cart)).layer(one_at_a_time);
        let orders = Router::new()
            .route("/orders/{order_id}", get(show))
            .route("/orders/{order_id}/pay", post(pay))
            .route("/orders/{order_id}/pay-in-turn", post(pay_in_turn));
        Ok(orders.merge(carts).with_state(self))
    }

    /// Pays an order; to be called under its lock.
    async fn charge(&self, order_id: u64) -> Order {
        (self.bank)(order_id).await;
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        let order = orders.entry(order_id).or_default();
        order.payments += 1;
        order.fence = leasehold::current_fence().map(leasehold::Fence::get);
        order.clone()
    }
}

/// Somebody else is on this order: 409, at once.
#[axum::debug_handler]
#[lock(key = "order:{order_id}", locks = shop.locks, ttl_ms = 15_000)]
async fn pay(State(shop): State<Shop>, Path(order_id): Path<u64>) -> Result<Json<Order>, Error> {
    Ok(Json(shop.charge(order_id).await))
}

/// Somebody else is on this order: in turn, for at most five seconds.
#[axum::debug_handler]
#[lock(key = "order:{order_id}", locks = shop.locks, ttl_ms = 15_000, wait_ms = 5_000)]
async fn pay_in_turn(State(shop): State<Shop>, Path(order_id): Path<u64>) -> Result<Json<Order>, Error> {
    Ok(Json(shop.charge(order_id).await))
}

/// An order as it is; looking needs no lock.
async fn show(State(shop): State<Shop>, Path(order_id): Path<u64>) -> Json<Order> {
    let orders = shop.orders.lock().unwrap_or_else(PoisonError::into_inner);
    Json(orders.get(&order_id).cloned().unwrap_or_default())
}

/// Under the lock of a layer: nothing of it is seen here.
async fn save_cart(Path(cart_id): Path<String>) -> String {
    format!("cart {cart_id} saved\n")
}
