use std::fmt;
use std::sync::Arc;

use super::invalid::{Invalid, beginning, text_problem};

/// The name of a lock: 1 to 512 bytes of UTF-8 without control characters.
///
/// ```
/// use leasehold::LockName;
///
/// assert!(LockName::new("order:42").is_ok());
/// assert!(LockName::new("").is_err());
/// assert!(LockName::new("two\nlines").is_err());
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LockName(Arc<str>);

impl LockName {
    /// The longest name, in bytes.
    pub const MAX_BYTES: usize = 512;

    /// Creates a name.
    ///
    /// # Errors
    /// [`Invalid::Name`] when it is empty, too long or has control characters.
    pub fn new(name: impl AsRef<str>) -> Result<Self, Invalid> {
        let name = name.as_ref();
        match text_problem(name, Self::MAX_BYTES, "is longer than 512 bytes") {
            Some(problem) => Err(Invalid::Name { name: beginning(name), problem }),
            None => Ok(Self(name.into())),
        }
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

impl TryFrom<&str> for LockName {
    type Error = Invalid;
    fn try_from(name: &str) -> Result<Self, Invalid> {
        Self::new(name)
    }
}

impl TryFrom<String> for LockName {
    type Error = Invalid;
    fn try_from(name: String) -> Result<Self, Invalid> {
        Self::new(name)
    }
}

/// Separates the locks of applications that share a store: `[A-Za-z0-9_.-]{0,64}`, `leasehold` by default.
///
/// With an empty namespace every name is its own key.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Namespace(Arc<str>);

impl Namespace {
    /// Creates a namespace.
    ///
    /// # Errors
    /// [`Invalid::Setting`] when it has a character outside `[A-Za-z0-9_.-]` or more than 64 characters.
    pub fn new(text: impl AsRef<str>) -> Result<Self, Invalid> {
        let text = text.as_ref();
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
        if text.len() <= 64 && text.bytes().all(allowed) {
            return Ok(Self(text.into()));
        }
        Err(Invalid::Setting {
            setting: "namespace",
            given: beginning(text),
            problem: "must be at most 64 of A-Z a-z 0-9 _ . -".into(),
        })
    }

    /// Returns the namespace as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for Namespace {
    fn default() -> Self {
        Self("leasehold".into())
    }
}

/// Selects names that are their own key, so that other clients of the store can use them: an exact name (`cron`) or a
/// prefix (`gpu_lock:*`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RawPattern {
    beginning: Arc<str>,
    open: bool,
}

impl RawPattern {
    /// Creates a pattern: text without control characters, with `*` only at its end.
    ///
    /// # Errors
    /// [`Invalid::Setting`] when it is empty or has a `*` elsewhere.
    pub fn new(pattern: impl AsRef<str>) -> Result<Self, Invalid> {
        let pattern = pattern.as_ref();
        let (start, open) = match pattern.strip_suffix('*') {
            Some(start) => (start, true),
            None => (pattern, false),
        };
        if pattern.is_empty() || start.contains('*') || start.chars().any(char::is_control) {
            return Err(Invalid::Setting {
                setting: "raw pattern",
                given: beginning(pattern),
                problem: "must be a text, with `*` at its end or not at all".into(),
            });
        }
        Ok(Self { beginning: start.into(), open })
    }

    /// Returns whether a name matches.
    pub fn matches(&self, name: &str) -> bool {
        if self.open { name.starts_with(&*self.beginning) } else { name == &*self.beginning }
    }

    /// Returns whether any text that begins with `prefix` matches.
    fn reaches_into(&self, prefix: &str) -> bool {
        self.beginning.starts_with(prefix) || (self.open && prefix.starts_with(&*self.beginning))
    }
}

impl fmt::Display for RawPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.beginning, if self.open { "*" } else { "" })
    }
}

/// The kind of a binding. Each kind has ids of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BindingKind {
    /// Values of [`bindings`](crate::LockManager::bindings).
    Bindings,
    /// Results of [`once`](crate::LockManager::once).
    Results,
    /// Random keys that all servers of a store share.
    Secrets,
}

/// Maps names to keys and back. Nothing else does.
///
/// ```
/// use leasehold::store::KeySpace;
/// use leasehold::LockName;
///
/// let keys = KeySpace::default();
/// assert_eq!(keys.key(&LockName::new("order:42")?)?, "leasehold:lock:order:42");
/// assert_eq!(keys.key(&LockName::new("gpu_lock:0")?)?, "gpu_lock:0");
/// # Ok::<(), leasehold::lease::Invalid>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeySpace {
    namespace: Namespace,
    raw: Vec<RawPattern>,
    /// `<namespace>:lock:`, or empty.
    prefix: Arc<str>,
}

impl KeySpace {
    /// The prefix of leasehold's helper keys. No lock can have such a key.
    pub const RESERVED: &'static str = "lh1:";

    /// Creates a key space in which no two names share a key.
    ///
    /// # Errors
    /// [`Invalid::Setting`] when a raw pattern reaches into the namespace's own keys.
    pub fn new(namespace: Namespace, raw: Vec<RawPattern>) -> Result<Self, Invalid> {
        let prefix: Arc<str> = match namespace.as_str() {
            "" => "".into(),
            ns => format!("{ns}:lock:").into(),
        };
        if !prefix.is_empty()
            && let Some(bad) = raw.iter().find(|p| p.reaches_into(&prefix))
        {
            return Err(Invalid::Setting {
                setting: "raw pattern",
                given: beginning(&bad.beginning),
                problem: format!(
                    "reaches into the keys of namespace {:?}, where two names would share a key; \
                     use an empty namespace to make every name raw",
                    namespace.as_str()
                ),
            });
        }
        Ok(Self { namespace, raw, prefix })
    }

    /// Returns the namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Returns the patterns of the names that are their own key.
    pub fn raw(&self) -> &[RawPattern] {
        &self.raw
    }

    /// Returns the key of a name.
    ///
    /// # Errors
    /// [`Invalid::Name`] when a raw name begins with [`KeySpace::RESERVED`].
    pub fn key(&self, name: &LockName) -> Result<String, Invalid> {
        self.check(name)?;
        let prefix = if self.is_raw(name) { "" } else { &self.prefix };
        let mut key = String::with_capacity(prefix.len() + name.as_str().len());
        key.push_str(prefix);
        key.push_str(name.as_str());
        Ok(key)
    }

    /// Returns the key of a binding. It is a helper key, so no lock can have it. A namespace has no `:`, so no two ids share
    /// a key.
    pub fn binding_key(&self, kind: BindingKind, id: &LockName) -> String {
        let kind = match kind {
            BindingKind::Bindings => "bind",
            BindingKind::Results => "once",
            BindingKind::Secrets => "secret",
        };
        format!("{}{kind}:{}:{id}", Self::RESERVED, self.namespace.as_str())
    }

    /// Returns the key of the slots of a node.
    pub fn slots_key(&self, node: &LockName) -> String {
        format!("{}{node}", self.slots_prefix())
    }

    pub(crate) fn slots_prefix(&self) -> String {
        format!("{}slots:{}:", Self::RESERVED, self.namespace.as_str())
    }

    /// Checks whether a name can have a key.
    pub(crate) fn check(&self, name: &LockName) -> Result<(), Invalid> {
        if name.as_str().starts_with(Self::RESERVED) && self.is_raw(name) {
            return Err(Invalid::Name {
                name: beginning(name.as_str()),
                problem: "begins with `lh1:`, which is reserved while names are their own keys",
            });
        }
        Ok(())
    }

    /// Returns the name that has this key, or `None` when no name has it.
    pub fn name(&self, key: &str) -> Option<LockName> {
        let name = match key.strip_prefix(&*self.prefix) {
            Some(rest) if !self.prefix.is_empty() => LockName::new(rest).ok().filter(|n| !self.is_raw(n)),
            _ => LockName::new(key).ok().filter(|n| self.is_raw(n)),
        };
        name.filter(|n| self.key(n).is_ok())
    }

    /// Returns whether a name is its own key.
    pub fn is_raw(&self, name: &LockName) -> bool {
        self.prefix.is_empty() || self.raw.iter().any(|p| p.matches(name.as_str()))
    }

    /// Returns the key prefixes to search for names that begin with `prefix`.
    pub(crate) fn key_prefixes(&self, prefix: &str) -> Vec<String> {
        let mut found = vec![format!("{}{prefix}", self.prefix)];
        if self.prefix.is_empty() {
            return found;
        }
        for pattern in &self.raw {
            if pattern.beginning.starts_with(prefix) {
                found.push(pattern.beginning.to_string());
            } else if pattern.open && prefix.starts_with(&*pattern.beginning) {
                found.push(prefix.to_owned());
            }
        }
        found
    }
}

impl Default for KeySpace {
    /// Namespace `leasehold`; `gpu_lock:*` and `task_lock:*` are raw.
    fn default() -> Self {
        let raw = ["gpu_lock:*", "task_lock:*"].map(|p| RawPattern::new(p).expect("valid"));
        Self::new(Namespace::default(), raw.into()).expect("valid")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> LockName {
        LockName::new(text).expect("valid")
    }

    #[test]
    fn names_have_bounds() {
        assert!(LockName::new("x".repeat(512)).is_ok());
        assert!(LockName::new("x".repeat(513)).is_err());
        for bad in ["", "\0", "a\tb", "\u{7f}", "\u{9b}31m"] {
            assert!(LockName::new(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn keys_and_names_map_both_ways() {
        let keys = KeySpace::default();
        for n in ["a", "gpu_lock:0", "lock:a", "leasehold:lock:a", "lh1:fence", "{x}", "ünï"] {
            let key = keys.key(&name(n)).expect("a key");
            assert_eq!(keys.name(&key), Some(name(n)), "{key}");
        }
        assert_eq!(keys.name("somebody:else"), None);
        // A raw name never has a key with the prefix.
        assert_eq!(keys.name("leasehold:lock:gpu_lock:0"), None);
    }

    #[test]
    fn an_empty_namespace_makes_every_name_raw() {
        let keys = KeySpace::new(Namespace::new("").expect("valid"), vec![]).expect("valid");
        assert_eq!(keys.key(&name("order:1")).expect("a key"), "order:1");
        assert!(keys.key(&name("lh1:fence")).is_err(), "our own keys are not locks");
        assert_eq!(keys.name("lh1:fence"), None);
    }

    #[test]
    fn raw_patterns_cannot_reach_into_the_namespace() {
        for bad in ["*", "lease*", "leasehold:lock:x", "leasehold:*", "leasehold:lock:*"] {
            let raw = vec![RawPattern::new(bad).expect("a pattern")];
            assert!(KeySpace::new(Namespace::default(), raw).is_err(), "{bad}");
        }
        assert!(RawPattern::new("a*b").is_err());
        assert!(Namespace::new("a:b").is_err());
    }

    #[test]
    fn no_lock_can_have_the_key_of_a_binding() {
        let keys = |ns: &str| KeySpace::new(Namespace::new(ns).expect("valid"), vec![]).expect("valid");
        let (a, raw) = (keys("a"), keys(""));
        assert_eq!(a.binding_key(BindingKind::Bindings, &name("x")), "lh1:bind:a:x");
        assert_eq!(raw.binding_key(BindingKind::Results, &name("a:x")), "lh1:once::a:x");
        assert_eq!(a.binding_key(BindingKind::Secrets, &name("x")), "lh1:secret:a:x");
        assert_ne!(
            raw.binding_key(BindingKind::Bindings, &name("a:x")),
            a.binding_key(BindingKind::Bindings, &name("x"))
        );
        assert!(raw.key(&name("lh1:bind:a:x")).is_err());
        assert_eq!(a.slots_key(&name("node 7")), "lh1:slots:a:node 7");
    }

    #[test]
    fn a_search_covers_every_key_that_a_prefix_can_have() {
        let keys = KeySpace::default();
        assert_eq!(keys.key_prefixes("gpu_lock:1"), ["leasehold:lock:gpu_lock:1", "gpu_lock:1"]);
        assert_eq!(keys.key_prefixes("gpu"), ["leasehold:lock:gpu", "gpu_lock:"]);
        assert_eq!(keys.key_prefixes("x"), ["leasehold:lock:x"]);
    }
}
