//! What the outside hears of the prefix tree: blocks stored and removed, and a list of all.
//!
//! Routers and KV hand-over recognise a prefix by its [`ChainHash`]. It is the same in every process
//! and version, whatever `hash_seed` is: the first 16 bytes, read as a big-endian number, of SHA-256
//! over
//!
//! ```text
//!   1 byte             0 for the first block of a sequence, otherwise 1
//!   16 bytes           first block: namespace, big-endian; otherwise: chain hash of the block before
//!   4 bytes            block_size, little-endian, as all that follows
//!   4 × block_size     token ids
//!   24 each            spans that overlap the block, by start: start (4), end (4), digest (16);
//!                      positions count from the start of the sequence
//! ```
//!
//! The first 32 hexadecimal digits of the digest are the hash as people print it. The epoch that
//! `reset` begins is not part of it: a reset is an event of its own.

use fastserve_base::{BlockId, Namespace};
use sha2::{Digest, Sha256};

use crate::tree::BlockKey;

/// Name of a block's whole prefix, the same in every process and version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ChainHash(pub u128);

/// Where a stored block's keys and values are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CacheTier {
    /// The device's own pool, the only tier for now.
    Device,
}

/// A change of the prefix tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockEvent {
    /// A block became shareable. Its parent was stored before and has not been removed.
    Stored {
        /// The block.
        block: BlockId,
        /// Its prefix, itself included.
        hash: ChainHash,
        /// The prefix it follows, `None` for the first block of a sequence.
        parent: Option<ChainHash>,
        /// Who may share it.
        namespace: Namespace,
        /// Where it is.
        tier: CacheTier,
    },
    /// A block can no longer be matched: evicted, or the step that was to write it failed.
    Removed {
        /// The block.
        block: BlockId,
        /// What it was stored under.
        hash: ChainHash,
        /// Where it was.
        tier: CacheTier,
    },
    /// Every block stored before this is removed.
    Cleared,
}

/// One block of the prefix tree, as [`KvManager::snapshot`](crate::KvManager::snapshot) lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockInfo {
    /// The block.
    pub block: BlockId,
    /// The block before it, `None` for the first block of a sequence.
    pub parent: Option<BlockId>,
    /// Who may share it.
    pub namespace: Namespace,
    /// Sequences that use it now; 0 for a cached block.
    pub num_uses: u32,
    /// Its prefix's name, where block events are on.
    pub hash: Option<ChainHash>,
    /// Where it is.
    pub tier: CacheTier,
}

/// Chain hash of a block. `parent` is that of the block before it.
pub(crate) fn chain_hash(parent: Option<ChainHash>, key: &BlockKey<'_>) -> ChainHash {
    let mut sha = Sha256::new();
    sha.update([u8::from(parent.is_some())]);
    sha.update(parent.map_or(key.namespace.0, |parent| parent.0).to_be_bytes());
    sha.update((key.tokens.len() as u32).to_le_bytes());
    for token in key.tokens {
        sha.update(token.to_le_bytes());
    }
    for span in key.spans {
        sha.update(span.start.to_le_bytes());
        sha.update(span.end.to_le_bytes());
        sha.update(span.digest.to_le_bytes());
    }
    let digest: [u8; 32] = sha.finalize().into();
    let (first, _) = digest.split_first_chunk().expect("32 bytes have a first 16");
    ChainHash(u128::from_be_bytes(*first))
}

/// Events that nobody has taken yet, and the chain hashes of the nodes. Grows if nobody takes them.
#[derive(Clone)]
pub(crate) struct EventLog {
    pending: Vec<BlockEvent>,
    hashes: Vec<ChainHash>,
}

impl EventLog {
    pub(crate) fn new(num_blocks: u32) -> Self {
        Self { pending: Vec::new(), hashes: vec![ChainHash::default(); num_blocks as usize] }
    }

    /// Chain hash of a node.
    pub(crate) fn hash(&self, block: BlockId) -> ChainHash {
        self.hashes[block.index()]
    }

    pub(crate) fn stored(&mut self, block: BlockId, key: &BlockKey<'_>) {
        let parent = key.parent.map(|parent| self.hash(parent));
        let (hash, namespace) = (chain_hash(parent, key), key.namespace);
        self.hashes[block.index()] = hash;
        let tier = CacheTier::Device;
        self.pending.push(BlockEvent::Stored { block, hash, parent, namespace, tier });
    }

    pub(crate) fn removed(&mut self, block: BlockId) {
        let (hash, tier) = (self.hash(block), CacheTier::Device);
        self.pending.push(BlockEvent::Removed { block, hash, tier });
    }

    pub(crate) fn cleared(&mut self) {
        self.pending.push(BlockEvent::Cleared);
    }

    /// Exchange the pending events for the empty `into`.
    pub(crate) fn take(&mut self, into: &mut Vec<BlockEvent>) {
        std::mem::swap(&mut self.pending, into);
    }
}

#[cfg(test)]
mod tests;
