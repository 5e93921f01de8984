//! Block tables of the running sequences, over one pool and one prefix tree.

use fastserve_base::{BlockId, CoreConfig, Namespace, RowSlot, Span, StepId, Token};

use crate::{BlockEvent, BlockInfo};

/// What a sequence's blocks are keyed by, beside its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeqKey<'a> {
    /// Who may share the blocks.
    pub namespace: Namespace,
    /// Stretches whose meaning is not their tokens, sorted by start, not overlapping.
    pub spans: &'a [Span],
}

/// What a match found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Probe {
    /// Blocks matched.
    pub num_blocks: u32,
    /// Of them, blocks in state cached: adopting makes them held, so
    /// [`available`](KvManager::available) falls by this many.
    pub num_cached: u32,
}

/// Blocks in each state. `free + held + cached == capacity`, always.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockCounts {
    /// Blocks that hold nothing.
    pub free: usize,
    /// Blocks in the table of at least one sequence.
    pub held: usize,
    /// Blocks that no sequence uses, kept for a later match.
    pub cached: usize,
    /// Blocks in the pool.
    pub capacity: usize,
}

/// More blocks were asked for than are free or cached. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{requested} blocks wanted, {free} are free and {cached} cached; end or preempt a sequence")]
pub struct OutOfBlocks {
    /// Blocks asked for.
    pub requested: usize,
    /// Blocks free.
    pub free: usize,
    /// Blocks cached, all of them evictable.
    pub cached: usize,
}

/// Block pool, prefix tree and block tables as one.
///
/// A row slot is *open* from [`open`](Self::open) or [`fork`](Self::fork) to
/// [`close`](Self::close). Its table's first [`num_shared`](Self::num_shared) blocks are in the
/// tree, one below the other; the rest are its own (or its forks'). Its chain is *broken* when it
/// may share no more blocks: it computed a block that the tree already had, or the cache was reset
/// under it. It keeps working; only its later blocks are not cached.
///
/// Calls that break a rule stated at the call panic: they are bugs of the caller.
#[derive(Clone)]
pub struct KvManager {}

#[expect(clippy::unused_self, clippy::needless_pass_by_value, reason = "signatures first")]
impl KvManager {
    /// Everything free, nothing cached. `config` is validated.
    pub fn new(config: &CoreConfig) -> Self {
        unimplemented!("{config:?}")
    }

    /// Block tables, `[max_num_seqs, max_blocks_per_seq]`, at an address that never changes.
    ///
    /// A row's entries past [`num_blocks_of`](Self::num_blocks_of) mean nothing.
    pub fn block_tables(&self) -> &[i32] {
        unimplemented!()
    }

    /// Blocks in the table of `slot`. 0 for a slot that is not open.
    pub fn num_blocks_of(&self, slot: RowSlot) -> usize {
        unimplemented!("{slot:?}")
    }

    /// The blocks of `slot`, in order.
    pub fn table(&self, slot: RowSlot) -> &[i32] {
        unimplemented!("{slot:?}")
    }

    /// Leading blocks of `slot` that are in the tree.
    pub fn num_shared(&self, slot: RowSlot) -> usize {
        unimplemented!("{slot:?}")
    }

    /// Whether `slot` shares no more blocks until it is closed.
    pub fn is_broken(&self, slot: RowSlot) -> bool {
        unimplemented!("{slot:?}")
    }

    /// Whether `slot` is between `open` and `close`.
    pub fn is_open(&self, slot: RowSlot) -> bool {
        unimplemented!("{slot:?}")
    }

    /// Blocks that [`allocate`](Self::allocate) can give: free and cached together.
    pub fn available(&self) -> usize {
        unimplemented!()
    }

    /// Blocks in each state.
    pub fn counts(&self) -> BlockCounts {
        unimplemented!()
    }

    /// Cached blocks evicted to make room, since construction.
    pub fn num_evicted_blocks(&self) -> u64 {
        unimplemented!()
    }

    /// Start a sequence in `slot` with an empty table. The slot must not be open.
    pub fn open(&mut self, slot: RowSlot, namespace: Namespace) {
        unimplemented!("{slot:?} {namespace:?}")
    }

    /// Longest prefix of `tokens` in the tree, in whole blocks and at most `max_tokens` tokens, for a
    /// sequence that is not running yet.
    ///
    /// Changes no block. The path is remembered for [`adopt`](Self::adopt) until the next call that
    /// changes a block or probes again (`open` and `step_committed` do not). O(blocks matched).
    pub fn probe(&mut self, key: SeqKey<'_>, tokens: &[Token], max_tokens: usize) -> Probe {
        unimplemented!("{key:?} {tokens:?} {max_tokens}")
    }

    /// As [`probe`](Self::probe), for what follows the blocks of the running sequence in `slot`.
    ///
    /// Finds nothing unless every block of the slot is shared and its chain is unbroken, so that the
    /// matched blocks can be appended.
    pub fn probe_from(
        &mut self,
        slot: RowSlot,
        key: SeqKey<'_>,
        tokens: &[Token],
        max_tokens: usize,
    ) -> Probe {
        unimplemented!("{slot:?} {key:?} {tokens:?} {max_tokens}")
    }

    /// Last block of the path that the last probe found, the slot's own blocks of `probe_from`
    /// included. `None` if that path is empty.
    ///
    /// Two sequences of one namespace with equal tails, and equal tokens and spans in the block that
    /// follows, are about to compute the same block: that is exact.
    pub fn probe_tail(&self) -> Option<BlockId> {
        unimplemented!()
    }

    /// Hash of the block that follows the path of the last probe: of its parent, tokens and spans.
    ///
    /// `None` if fewer than `block_size` tokens follow (of those given, whatever `max_tokens` was),
    /// if the chain of `probe_from`'s slot is broken, or if prefix caching is off. Equal blocks have
    /// equal hashes; the reverse is likely only, see [`probe_tail`](Self::probe_tail).
    pub fn probe_next_hash(&self) -> Option<u64> {
        unimplemented!()
    }

    /// Last shared block of `slot`, `None` if it shares none. The running side of
    /// [`probe_tail`](Self::probe_tail).
    pub fn tail(&self, slot: RowSlot) -> Option<BlockId> {
        unimplemented!("{slot:?}")
    }

    /// Hash of the first block of `slot` that is not shared yet, whether or not it has been
    /// allocated. The running side of [`probe_next_hash`](Self::probe_next_hash), under the same
    /// conditions.
    pub fn next_block_hash(
        &self,
        slot: RowSlot,
        key: SeqKey<'_>,
        tokens: &[Token],
    ) -> Option<u64> {
        unimplemented!("{slot:?} {key:?} {tokens:?}")
    }

    /// Append the path of the last probe to the table of `slot`, one more use of each block.
    ///
    /// `slot` is open and has an empty table after `probe`, or is the slot given to `probe_from`.
    pub fn adopt(&mut self, slot: RowSlot) {
        unimplemented!("{slot:?}")
    }

    /// Append `n` fresh blocks to the table of `slot`, or change nothing.
    ///
    /// Takes free blocks first, then evicts exactly as many cached ones as are missing: leaves of the
    /// tree, longest unused first.
    ///
    /// # Errors
    ///
    /// [`OutOfBlocks`] if fewer than `n` blocks are free or cached.
    pub fn allocate(&mut self, slot: RowSlot, n: usize) -> Result<(), OutOfBlocks> {
        unimplemented!("{slot:?} {n}")
    }

    /// Put the blocks `num_shared..num_full` of `slot` into the tree, written by `step`.
    ///
    /// Their tokens are known and accepted, and the step that writes the last of their slots is
    /// planned: `tokens` are the sequence's, at least `num_full` blocks of them. Where the tree has
    /// an equal block of another sequence, that one stays, and the chain of `slot` is broken.
    pub fn share(
        &mut self,
        slot: RowSlot,
        key: SeqKey<'_>,
        tokens: &[Token],
        num_full: usize,
        step: StepId,
    ) {
        unimplemented!("{slot:?} {key:?} {tokens:?} {num_full} {step:?}")
    }

    /// Give `to`, open and empty, the whole table of `from`: one more use of each block.
    ///
    /// Before either writes into a block that both use, it calls
    /// [`copy_on_write`](Self::copy_on_write).
    pub fn fork(&mut self, from: RowSlot, to: RowSlot) {
        unimplemented!("{from:?} {to:?}")
    }

    /// Make the block at `index` of `slot` its own, before the sequence writes into it.
    ///
    /// If others use the block too, a fresh one takes its place in the table, and the answer is
    /// `(source, destination)` of the copy to make before the step's writes. `index` is not shared:
    /// a block of the tree is never written again.
    ///
    /// # Errors
    ///
    /// [`OutOfBlocks`] if a fresh block is needed and none is free or cached.
    pub fn copy_on_write(
        &mut self,
        slot: RowSlot,
        index: usize,
    ) -> Result<Option<(BlockId, BlockId)>, OutOfBlocks> {
        unimplemented!("{slot:?} {index}")
    }

    /// End the sequence in `slot`: one use less of each of its blocks.
    ///
    /// A block that nobody uses any more becomes cached if it is in the tree, otherwise free. All
    /// blocks cached by one close are equally old. Blocks named by a step in flight must not be
    /// closed before that step has committed.
    pub fn close(&mut self, slot: RowSlot) {
        unimplemented!("{slot:?}")
    }

    /// `step` has run: the blocks it wrote are certain. Steps commit in ascending order.
    pub fn step_committed(&mut self, step: StepId) {
        unimplemented!("{step:?}")
    }

    /// `from` and every later step failed or will not run: take the blocks they were to write out
    /// of the tree, and those below them.
    ///
    /// Cached ones become free. Held ones stay in their tables, no longer shared, and become free on
    /// release; `num_shared` of their slots falls. Which sequences must compute again is the caller's
    /// to find *before* this call: those planned in such a step, and those whose
    /// [`pending_step`](Self::pending_step) is not before `from`.
    pub fn step_failed(&mut self, from: StepId) {
        unimplemented!("{from:?}")
    }

    /// The latest step, not committed yet, that a shared block of `slot` waits for. `None` if all
    /// are certain.
    pub fn pending_step(&self, slot: RowSlot) -> Option<StepId> {
        unimplemented!("{slot:?}")
    }

    /// Forget every prefix: nothing shared before this call can be matched after it.
    ///
    /// Cached blocks become free. Held ones stay with their sequences and become free on release; the
    /// chains of all open slots are broken. O(capacity).
    pub fn reset(&mut self) {
        unimplemented!()
    }

    /// Leading blocks, at most `limit`, that the tables of `a` and `b` have in common.
    ///
    /// O(log blocks) over what both share through the tree.
    pub fn num_shared_leading(&self, a: RowSlot, b: RowSlot, limit: usize) -> usize {
        unimplemented!("{a:?} {b:?} {limit}")
    }

    /// Move the events since the last call into `into`, which is cleared first.
    ///
    /// Empty unless `enable_block_events`. A block is reported when the step that writes it is
    /// planned; if that step fails, its removal is reported too.
    pub fn take_events(&mut self, into: &mut Vec<BlockEvent>) {
        unimplemented!("{into:?}")
    }

    /// Every block of the prefix tree, parents before children. O(capacity).
    pub fn snapshot(&self) -> Vec<BlockInfo> {
        unimplemented!()
    }

    /// Panic if an invariant is broken. O(capacity + slots × blocks).
    pub fn check(&self) {
        unimplemented!()
    }
}
