//! The dispatcher of `docs/create-it-once.md`.

use std::sync::Arc;
use std::time::Duration;

use jobs::Dispatcher;
use leasehold::LockManager;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = std::env::var("LEASEHOLD_STORE").unwrap_or_else(|_| "sqlite:".into());
    let locks = LockManager::connect(&store).await?;
    let send = Arc::new(|job: String| -> std::pin::Pin<Box<dyn Future<Output = Result<(), String>> + Send>> {
        Box::pin(async move {
            // A slow node.
            tokio::time::sleep(Duration::from_secs(1)).await;
            println!("sent {job}");
            Ok(())
        })
    });
    let address = std::env::var("JOBS_LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = tokio::net::TcpListener::bind(&address).await?;
    println!("jobs on http://{}, bindings in {}", listener.local_addr()?, locks.store());
    axum::serve(listener, Dispatcher::new(locks, send).routes()).await?;
    Ok(())
}
