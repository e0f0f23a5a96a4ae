use std::borrow::Cow;

use crate::facts::{Invalid, LockName};

/// A value that names a lock: a [`LockName`], or text that is checked when the name is used.
///
/// Every method that takes a name accepts `"order:42"`, a `String`, a `LockName`, and references to them. Text that
/// cannot be a name makes the call fail with [`Error::Invalid`](crate::Error::Invalid). Implement it for a type of your
/// own to keep the names of a program in one place:
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::lease::{IntoLockName, Invalid};
/// use leasehold::{LockManager, LockName};
///
/// struct Order(u64);
///
/// impl IntoLockName for Order {
///     fn into_lock_name(self) -> Result<LockName, Invalid> {
///         LockName::new(format!("order:{}", self.0))
///     }
/// }
///
/// let locks = LockManager::connect("memory:").await?;
/// let guard = locks.lock(Order(42)).await?;
/// assert_eq!(guard.name().as_str(), "order:42");
/// # Ok(()) }
/// ```
pub trait IntoLockName {
    /// Returns the name.
    ///
    /// # Errors
    /// [`Invalid::Name`] when the text is empty, too long, or contains control characters.
    fn into_lock_name(self) -> Result<LockName, Invalid>;
}

impl IntoLockName for LockName {
    fn into_lock_name(self) -> Result<LockName, Invalid> {
        Ok(self)
    }
}

impl IntoLockName for &LockName {
    fn into_lock_name(self) -> Result<LockName, Invalid> {
        Ok(self.clone())
    }
}

/// For kinds of text.
macro_rules! text {
    ($($text:ty),*) => {$(
        impl IntoLockName for $text {
            fn into_lock_name(self) -> Result<LockName, Invalid> {
                LockName::new(self)
            }
        }
    )*};
}

text!(&str, String, &String, Cow<'_, str>);

#[cfg(test)]
mod tests {
    use super::*;

    fn name(given: impl IntoLockName) -> Result<LockName, Invalid> {
        given.into_lock_name()
    }

    #[test]
    fn names_are_given_as_text_or_as_names() {
        let text = String::from("order:42");
        let parsed = LockName::new(&text).expect("valid");
        let given = [name("order:42"), name(&text), name(text.clone()), name(Cow::from(text)), name(&parsed)];
        assert!(given.iter().all(|given| given.as_ref() == Ok(&parsed)), "{given:?}");
        assert_eq!(name(parsed.clone()), Ok(parsed));
        assert!(matches!(name(""), Err(Invalid::Name { .. })));
    }
}
