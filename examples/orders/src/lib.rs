//! One order is paid by one request at a time, in all instances of this service.
//!
//! ```text
//! cargo run --release -p orders
//! curl -X POST localhost:3000/orders/7/pay & curl -X POST localhost:3000/orders/7/pay
//! ```
//!
//! One response is 200, the other is 409 at once. `docs/one-order-at-a-time.md` explains it.

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

/// The state of the handlers.
#[derive(Clone)]
pub struct Shop {
    locks: LockManager,
    bank: Bank,
    orders: Arc<Mutex<HashMap<u64, Order>>>,
}

/// Moves the money of an order, which takes a while.
pub type Bank = Arc<dyn Fn(u64) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// An order.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Order {
    /// The number of payments.
    pub payments: u32,
    /// The fence of the last payment, which a database would compare before it writes.
    pub fence: Option<u64>,
}

impl Shop {
    /// Creates a shop with these locks and this bank.
    pub fn new(locks: LockManager, bank: Bank) -> Self {
        Self { locks, bank, orders: Arc::default() }
    }

    /// Returns its routes.
    ///
    /// # Errors
    /// If the key of the carts' lock is invalid.
    pub fn routes(self) -> Result<Router, Invalid> {
        let one_at_a_time = LockLayer::new(self.locks.clone(), "cart:{cart_id}")?.wait_up_to(Duration::from_secs(2));
        let carts = Router::new().route("/carts/{cart_id}", put(save_cart)).layer(one_at_a_time);
        let orders = Router::new()
            .route("/orders/{order_id}", get(show))
            .route("/orders/{order_id}/pay", post(pay))
            .route("/orders/{order_id}/pay-in-turn", post(pay_in_turn));
        Ok(orders.merge(carts).with_state(self))
    }

    /// Pays an order. Call it under the lock of the order.
    async fn charge(&self, order_id: u64) -> Order {
        (self.bank)(order_id).await;
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        let order = orders.entry(order_id).or_default();
        order.payments += 1;
        order.fence = leasehold::current_fence().map(leasehold::Fence::get);
        order.clone()
    }
}

/// Responds with 409 at once while another request works on this order.
#[axum::debug_handler]
#[lock(key = "order:{order_id}", locks = shop.locks, ttl_ms = 15_000)]
async fn pay(State(shop): State<Shop>, Path(order_id): Path<u64>) -> Result<Json<Order>, Error> {
    Ok(Json(shop.charge(order_id).await))
}

/// Waits for its turn for at most five seconds while another request works on this order.
#[axum::debug_handler]
#[lock(key = "order:{order_id}", locks = shop.locks, ttl_ms = 15_000, wait_ms = 5_000)]
async fn pay_in_turn(State(shop): State<Shop>, Path(order_id): Path<u64>) -> Result<Json<Order>, Error> {
    Ok(Json(shop.charge(order_id).await))
}

/// Returns an order. Reading needs no lock.
async fn show(State(shop): State<Shop>, Path(order_id): Path<u64>) -> Json<Order> {
    let orders = shop.orders.lock().unwrap_or_else(PoisonError::into_inner);
    Json(orders.get(&order_id).cloned().unwrap_or_default())
}

/// Runs under the lock of a layer, so nothing of it is visible here.
async fn save_cart(Path(cart_id): Path<String>) -> String {
    format!("cart {cart_id} saved\n")
}
