//! A bounded map that forgets what has not been used for long.

use std::collections::HashMap;
use std::hash::Hash;

/// A map of at most `capacity` values in two generations. A value that is used
/// moves to the young one; when that is full, it becomes the old one, and what
/// was still in the old one is forgotten.
#[derive(Debug)]
pub(super) struct Cache<K, V> {
    young: HashMap<K, V>,
    old: HashMap<K, V>,
    half: usize,
}

impl<K: Eq + Hash + Copy, V: Clone> Cache<K, V> {
    /// An empty cache.
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            young: HashMap::new(),
            old: HashMap::new(),
            half: (capacity / 2).max(1),
        }
    }

    /// The value of `key`, which then counts as used.
    pub(super) fn get(&mut self, key: K) -> Option<V> {
        if let Some(value) = self.young.get(&key) {
            return Some(value.clone());
        }
        let value = self.old.remove(&key)?;
        self.insert(key, value.clone());
        Some(value)
    }

    /// Sets the value of `key`.
    pub(super) fn insert(&mut self, key: K, value: V) {
        if self.young.len() >= self.half && !self.young.contains_key(&key) {
            self.old = std::mem::take(&mut self.young);
        }
        self.old.remove(&key);
        self.young.insert(key, value);
    }

    /// Forgets `key`.
    pub(super) fn remove(&mut self, key: K) {
        self.young.remove(&key);
        self.old.remove(&key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_stays_and_the_rest_is_forgotten() {
        let mut cache = Cache::new(8);
        cache.insert(0, "used");
        for key in 1..100 {
            cache.insert(key, "once");
            assert_eq!(cache.get(0), Some("used"));
            assert!(cache.young.len() + cache.old.len() <= 8);
        }
        assert_eq!(cache.get(1), None);
        assert_eq!(cache.get(99), Some("once"));
        cache.remove(99);
        assert_eq!(cache.get(99), None);
    }
}
