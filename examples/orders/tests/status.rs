//! Another status for held locks. It has a file of its own, because the status is set once per process.

use axum::http::StatusCode;
use axum::response::IntoResponse;
use leasehold::LockManager;
use leasehold::http::answer_held_with;

#[tokio::test]
async fn held_can_be_423() {
    answer_held_with(StatusCode::LOCKED).expect("the first to say");
    let locks = LockManager::connect("memory:").await.expect("memory");
    let _guard = locks.lock("order:1").await.expect("free");
    let response = locks.lock("order:1").no_wait().await.expect_err("held").into_response();
    assert_eq!(response.status(), StatusCode::LOCKED);
}
