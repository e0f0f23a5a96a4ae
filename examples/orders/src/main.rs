//! The service. `ORDERS_LISTEN` is its address (127.0.0.1:3000), `ORDERS_BANK_MS` the duration of a payment (2000).
//! `LEASEHOLD_STORE` and `LEASEHOLD_CONFIG` select the store.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use leasehold::config::Config;
use orders::Shop;
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("orders: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Box<dyn std::error::Error>> {
    let locks = Config::load(None)?.connect().await?;
    let takes = Duration::from_millis(variable("ORDERS_BANK_MS", "2000").parse()?);
    let listener = TcpListener::bind(variable("ORDERS_LISTEN", "127.0.0.1:3000")).await?;
    println!("orders on http://{}, locks in {}", listener.local_addr()?, locks.store());

    let shop = Shop::new(locks.clone(), Arc::new(move |_| Box::pin(tokio::time::sleep(takes))));
    let stop = async {
        // If Ctrl-C cannot be handled, it runs until it is killed.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    axum::serve(listener, shop.routes()?).with_graceful_shutdown(stop).await?;
    locks.shutdown().await;
    Ok(())
}

fn variable(name: &str, otherwise: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| otherwise.to_owned())
}
