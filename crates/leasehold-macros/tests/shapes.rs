//! Every kind of function that can have `#[lock]`.
#![deny(warnings)]

use std::error::Error as StdError;
use std::fmt::Display;
use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;
use axum::extract::{Path, State};
use leasehold::{Error, LockManager, current_fence, lock};

async fn locks() -> LockManager {
    LockManager::connect("memory:").await.expect("memory")
}

/// Returns whether the caller runs under the lock of this name.
async fn held(locks: &LockManager, name: &str) -> bool {
    current_fence().is_some() && locks.is_locked(name).await.expect("answered")
}

type Boxed = Box<dyn StdError + Send + Sync>;
type Answer<T = bool> = Result<T, Boxed>;

// Free functions: references, lifetimes, generics, `impl Trait`, `where`.

#[lock(key = "free:{id}", locks = locks)]
async fn free(locks: &LockManager, id: u32) -> Answer {
    let parsed: u32 = "7".parse()?;
    if parsed == 8 {
        return Err("not reached".into());
    }
    Ok(held(locks, &format!("free:{id}")).await)
}

#[lock(key = "life:{text}", locks = locks)]
async fn life<'a>(locks: &LockManager, text: &'a str) -> Answer<&'a str> {
    assert!(held(locks, &format!("life:{text}")).await);
    Ok(text)
}

#[lock(key = "generic:{value}:{other}", locks = locks)]
async fn generic<T, const N: usize>(locks: &LockManager, value: T, other: impl Display + Send) -> Answer<[T; N]>
where
    T: Display + Clone + Send,
{
    assert!(held(locks, &format!("generic:{value}:{other}")).await);
    Ok(std::array::from_fn(|_| value.clone()))
}

#[lock(key = "opaque", locks = locks)]
async fn opaque(locks: &LockManager) -> Result<impl Display + use<>, Error> {
    let inside = held(locks, "opaque").await;
    Ok(format!("{inside}"))
}

/// The body is coerced to the return type of the signature.
#[lock(key = "coerced", locks = locks)]
async fn coerced(locks: &LockManager) -> Result<Box<dyn Display + Send>, Error> {
    if !held(locks, "coerced").await {
        return Ok(Box::new("outside"));
    }
    Ok(Box::new(17))
}

// Patterns in parameters.

struct Order {
    id: u32,
    lines: (u8, u8),
}

#[lock(key = "{{pattern}}:{a}:{b}:{id}:{whole.id}:{whole.lines.1}", locks = locks)]
async fn patterns(
    locks: &LockManager,
    (a, mut b): (u8, u8),
    Order { id, lines: _ }: Order,
    whole: &Order,
    mut count: u32,
    _: (),
) -> Answer<u32> {
    assert!(held(locks, "{pattern}:1:2:3:4:6").await);
    b += 1;
    count += u32::from(a) + u32::from(b) + id + whole.id + u32::from(whole.lines.0);
    Ok(count)
}

/// Parameters and fields that are keywords.
#[lock(key = "words:{type}:{r#type}:{row.type}", locks = locks)]
async fn words(locks: &LockManager, r#type: u32, row: &Row) -> Answer {
    Ok(held(locks, &format!("words:{type}:{type}:{}", row.r#type)).await)
}

struct Row {
    r#type: &'static str,
}

// Methods.

struct Till {
    locks: LockManager,
    tenant: String,
    count: u32,
}

impl Till {
    #[lock(key = "till:{self.tenant}:{id}", locks = self.locks)]
    async fn pay(&self, id: u32) -> Answer {
        Ok(held(&self.locks, &format!("till:{}:{id}", self.tenant)).await)
    }

    #[lock(key = "count", locks = self.locks)]
    async fn count(&mut self) -> Result<u32, Error> {
        self.count += 1;
        Ok(self.count)
    }

    #[lock(key = "into", locks = self.locks)]
    async fn into_tenant(self) -> Result<String, Error> {
        Ok(self.tenant)
    }

    #[lock(key = "arc:{self.tenant}", locks = self.locks)]
    async fn arc(self: Arc<Self>) -> Answer {
        Ok(held(&self.locks, &format!("arc:{}", self.tenant)).await)
    }

    #[lock(key = "pinned", locks = self.locks)]
    async fn pinned(mut self: Pin<&mut Self>) -> Result<u32, Error> {
        self.count += 1;
        Ok(self.count)
    }

    /// Two nested locks on a recursive method.
    #[lock(key = "deep:{n}", locks = self.locks)]
    #[lock(key = "deeper:{n}", locks = self.locks)]
    async fn deep(&self, n: u32) -> Result<u32, Error> {
        if n == 0 { Ok(0) } else { Ok(Box::pin(self.deep(n - 1)).await? + 1) }
    }
}

// Traits: async functions of the language, and `#[async_trait]`.

trait Native {
    async fn native(&self, id: u32) -> Answer;

    #[lock(key = "default:{id}", locks = locks)]
    async fn by_default(locks: &LockManager, id: u32) -> Answer {
        Ok(held(locks, &format!("default:{id}")).await)
    }
}

impl Native for Till {
    #[lock(key = "native:{id}", locks = self.locks)]
    async fn native(&self, id: u32) -> Answer {
        Ok(held(&self.locks, &format!("native:{id}")).await)
    }
}

#[async_trait]
trait Dynamic: Send {
    async fn shared(&self, id: u32, label: &str) -> Answer;
    async fn alone(&mut self, pair: (u8, u8), order: Order) -> Answer<u32>;
    async fn generic<T: Display + Send + Sync + 'static>(&self, value: T) -> Answer
    where
        Self: Sized;
}

#[async_trait]
impl Dynamic for Till {
    #[lock(key = "dyn:{self.tenant}:{id}:{label}", locks = self.locks)]
    async fn shared(&self, id: u32, label: &str) -> Answer {
        Ok(held(&self.locks, &format!("dyn:{}:{id}:{label}", self.tenant)).await)
    }

    #[lock(key = "dyn:{a}:{b}:{order.id}", locks = self.locks)]
    async fn alone(&mut self, (a, b): (u8, u8), order: Order) -> Answer<u32> {
        if !held(&self.locks, &format!("dyn:{a}:{b}:{}", order.id)).await {
            return Err("outside".into());
        }
        self.count += order.id;
        Ok(self.count)
    }

    #[lock(key = "dyn:{value}", locks = self.locks)]
    async fn generic<T: Display + Send + Sync + 'static>(&self, value: T) -> Answer {
        Ok(held(&self.locks, &format!("dyn:{value}")).await)
    }
}

// Other attributes, above and below.

#[tracing::instrument(skip(locks))]
#[lock(key = "above:{id}", locks = locks)]
async fn traced_above(locks: &LockManager, id: u32) -> Answer {
    Ok(held(locks, &format!("above:{id}")).await)
}

#[lock(key = "below:{id}", locks = locks)]
#[tracing::instrument(skip(locks))]
async fn traced_below(locks: &LockManager, id: u32) -> Answer {
    Ok(held(locks, &format!("below:{id}")).await)
}

#[axum::debug_handler]
#[lock(key = "handler:{id}", locks = locks)]
async fn handler_above(State(locks): State<LockManager>, Path(id): Path<u32>) -> Result<String, String2> {
    Ok(held(&locks, &format!("handler:{id}")).await.to_string())
}

#[lock(key = "handler:{id}", locks = locks)]
#[axum::debug_handler]
async fn handler_below(State(locks): State<LockManager>, Path(id): Path<u32>) -> Result<String, String2> {
    Ok(held(&locks, &format!("handler:{id}")).await.to_string())
}

/// An application's own error.
#[derive(Debug)]
struct String2(String);

impl From<Error> for String2 {
    fn from(error: Error) -> Self {
        Self(error.to_string())
    }
}

impl axum::response::IntoResponse for String2 {
    fn into_response(self) -> axum::response::Response {
        self.0.into_response()
    }
}

/// Names of the prelude with other meanings.
mod shadows {
    #![allow(dead_code, non_camel_case_types)]
    struct Option;
    struct Some;
    struct None;
    struct String;
    struct Box;
    struct Vec;
    struct Ok;
    struct bool_;
    mod std {}
    mod core {}

    #[leasehold::lock(key = "shadows:{__leasehold}", locks = locks)]
    pub async fn shadowed(
        locks: &leasehold::LockManager,
        __leasehold: u32,
    ) -> ::std::result::Result<(), leasehold::Error> {
        ::std::result::Result::Ok(())
    }
}

/// A function in a `macro_rules!`.
macro_rules! payer {
    ($name:ident, $param:ident) => {
        #[lock(key = "made:{id}", locks = locks)]
        async fn $name(locks: &LockManager, $param: u32) -> Answer {
            Ok(held(locks, &format!("made:{}", $param)).await)
        }
    };
}
payer!(made, id);

/// Checks that a future can be spawned.
fn sendable<F: Future + Send>(future: F) -> F {
    future
}

#[tokio::test]
async fn every_shape_runs_under_its_lock() {
    let locks = locks().await;
    assert!(sendable(free(&locks, 1)).await.expect("free"));
    assert_eq!(sendable(life(&locks, "x")).await.expect("free"), "x");
    assert_eq!(sendable(generic::<_, 2>(&locks, 5, "o")).await.expect("free"), [5, 5]);
    assert_eq!(sendable(opaque(&locks)).await.expect("free").to_string(), "true");
    assert_eq!(sendable(coerced(&locks)).await.expect("free").to_string(), "17");
    let order = |id| Order { id, lines: (5, 6) };
    assert_eq!(sendable(patterns(&locks, (1, 2), order(3), &order(4), 100, ())).await.expect("free"), 116);
    assert!(made(&locks, 3).await.expect("free"));
    assert!(sendable(words(&locks, 1, &Row { r#type: "t" })).await.expect("free"));
    shadows::shadowed(&locks, 1).await.expect("free");
    assert!(traced_above(&locks, 1).await.expect("free") && traced_below(&locks, 2).await.expect("free"));
    assert_eq!(handler_above(State(locks.clone()), Path(9)).await.expect("free"), "true");
    assert_eq!(sendable(handler_below(State(locks.clone()), Path(9))).await.expect("free"), "true");
    assert!(!locks.is_locked("handler:9").await.expect("answered"));
}

#[tokio::test]
async fn every_kind_of_method_runs_under_its_lock() {
    let mut till = Till { locks: locks().await, tenant: "acme".into(), count: 0 };
    assert!(sendable(till.pay(4)).await.expect("free"));
    assert!(till.native(5).await.expect("free") && Till::by_default(&till.locks, 6).await.expect("free"));
    assert!(Dynamic::generic(&till, "T").await.expect("free"));
    let dynamic: &mut dyn DynamicObject = &mut till;
    assert!(sendable(dynamic.shared(1, "l")).await.expect("free"));
    assert_eq!(dynamic.alone((1, 2), Order { id: 40, lines: (0, 0) }).await.expect("free"), 40);
    assert_eq!(till.count().await.expect("free"), 41);
    assert_eq!(sendable(Pin::new(&mut till).pinned()).await.expect("free"), 42);
    assert_eq!(till.deep(2).await.expect("free"), 2);
    let shared = Arc::new(Till { locks: till.locks.clone(), tenant: "other".into(), count: 0 });
    assert!(sendable(shared.arc()).await.expect("free"));
    assert_eq!(till.into_tenant().await.expect("free"), "acme");
}

/// `Dynamic` as an object.
use Dynamic as DynamicObject;

#[tokio::test]
async fn not_acquired_comes_back_as_the_error_of_the_function() {
    let locks = locks().await;
    let guard = locks.lock("free:1").await.expect("free");
    let error = free(&locks, 1).await.expect_err("held");
    assert!(matches!(error.downcast_ref::<Error>(), Some(Error::NotAcquired { .. })), "{error}");
    drop(guard);
}
