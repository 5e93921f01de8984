//! What the outside hears of the prefix tree: blocks stored and removed, and a list of all.

use fastserve_base::{BlockId, Namespace};

/// Name of a block's whole prefix, the same in every process and version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
