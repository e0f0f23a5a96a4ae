//! The service. `FENCES_LISTEN` is its address (127.0.0.1:3000), `FENCES_DB` the file of the accounts (accounts.db).

use std::path::PathBuf;
use std::process::ExitCode;

use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fences: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Box<dyn std::error::Error>> {
    let path = PathBuf::from(variable("FENCES_DB", "accounts.db"));
    let listener = TcpListener::bind(variable("FENCES_LISTEN", "127.0.0.1:3000")).await?;
    println!("fences on http://{}, accounts in {}", listener.local_addr()?, path.display());
    axum::serve(listener, fences::routes(&path)?).await?;
    Ok(())
}

fn variable(name: &str, otherwise: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| otherwise.to_owned())
}
