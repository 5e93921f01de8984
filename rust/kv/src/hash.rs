//! Hashes.
