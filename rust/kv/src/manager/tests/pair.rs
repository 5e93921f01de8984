//! A manager and its model side by side, compared in full after each operation.

use std::collections::BTreeMap;

use fastserve_base::{BlockId, CoreConfig, Namespace, RowSlot, StepId, Token};
use sha2::{Digest, Sha256};

use super::NUM_SLOTS;
use super::model::{Content, Model, Prefix, Seq};
use crate::{BlockEvent, ChainHash, KvManager, OutOfBlocks, Probe, SeqKey};

/// One step of a walk. What is not legal at that point is skipped.
#[derive(Debug, Clone)]
pub(super) enum Op {
    Open(usize, Content),
    /// Match and adopt what follows the slot's blocks, within this many tokens.
    Adopt(usize, usize),
    /// Match for a sequence that stays outside.
    Probe(Content, usize),
    Allocate(usize, usize),
    /// Share this many blocks, or as many as are full.
    Share(usize, usize),
    /// Generated tokens: copies what others use of the blocks that they go into.
    Generate(usize, Vec<Token>),
    CopyOnWrite(usize, usize),
    Fork(usize, usize),
    Close(usize),
    Plan,
    Commit,
    /// Fail this step in flight and all after it.
    Fail(usize),
    Reset,
}

/// What a listener knows of a block: its hash, its parent's, its namespace.
type Heard = (ChainHash, Option<ChainHash>, Namespace);

/// The manager, its model, and what a listener has made of the events.
#[derive(Clone)]
pub(super) struct Pair {
    pub(super) kv: KvManager,
    pub(super) model: Model,
    committed: u64,
    planned: u64,
    /// Whether equal hashes mean equal prefixes, as they do unless collisions are forced.
    hashes_tell: bool,
    heard: BTreeMap<BlockId, Heard>,
}

impl Pair {
    pub(super) fn new(config: &CoreConfig, hash_mask: u64) -> Self {
        let mut kv = KvManager::new(config);
        kv.tree.set_hash_mask(hash_mask);
        let model = Model {
            num_blocks: config.num_blocks,
            block_size: config.block_size as usize,
            enable_prefix_caching: config.enable_prefix_caching,
            nodes: vec![],
            seqs: vec![None; NUM_SLOTS],
            now: 0,
            num_evicted: 0,
        };
        let hashes_tell = hash_mask == u64::MAX;
        Self { kv, model, committed: 0, planned: 1, hashes_tell, heard: BTreeMap::new() }
    }

    /// Apply `op` to both, if it is legal, and compare. Returns whether it was.
    pub(super) fn apply(&mut self, op: &Op) -> bool {
        let is_legal = self.apply_to_both(op).is_some();
        if is_legal {
            self.compare();
        }
        is_legal
    }

    fn apply_to_both(&mut self, op: &Op) -> Option<()> {
        match op {
            Op::Open(slot, content) => self.open(*slot, content)?,
            Op::Adopt(slot, max_tokens) => self.adopt(*slot, *max_tokens)?,
            Op::Probe(content, max_tokens) => drop(self.probe(None, content, *max_tokens)),
            Op::Allocate(slot, n) => self.allocate(*slot, *n)?,
            Op::Share(slot, num_full) => self.share(*slot, *num_full)?,
            Op::Generate(slot, tokens) => self.generate(*slot, tokens)?,
            Op::CopyOnWrite(slot, index) => {
                let (blocks, after) = self.seq(*slot)?.blocks.split_at_checked(*index + 1)?;
                let is_last = after.iter().all(|block| self.model.num_uses(*block) == 1);
                (is_last && !self.model.is_node(blocks[*index])).then_some(())?;
                self.copy_on_write(*slot, *index);
            }
            Op::Fork(from, to) => self.fork(*from, *to)?,
            Op::Close(slot) => {
                self.seq(*slot)?;
                self.kv.close(row(*slot));
                self.model.close(*slot);
            }
            Op::Plan => self.planned += 1,
            Op::Commit => {
                self.committed += 1;
                self.planned = self.planned.max(self.committed + 1);
                self.kv.step_committed(StepId(self.committed));
            }
            Op::Fail(nth) => {
                let from = self.committed + 1 + *nth as u64;
                (from <= self.planned).then_some(())?;
                self.kv.step_failed(StepId(from));
                self.model.step_failed(StepId(from));
                self.planned += 1;
            }
            Op::Reset => {
                self.kv.reset();
                self.model.reset();
            }
        }
        Some(())
    }

    fn seq(&self, slot: usize) -> Option<&Seq> {
        self.model.seqs[slot].as_ref()
    }

    fn seq_mut(&mut self, slot: usize) -> &mut Seq {
        self.model.seqs[slot].as_mut().expect("open")
    }

    fn open(&mut self, slot: usize, content: &Content) -> Option<()> {
        self.seq(slot).is_none().then_some(())?;
        self.kv.open(row(slot), content.namespace);
        let content = content.clone();
        let seq = Seq { content, blocks: vec![], num_shared: 0, is_broken: false };
        self.model.seqs[slot] = Some(seq);
        Some(())
    }

    fn adopt(&mut self, slot: usize, max_tokens: usize) -> Option<()> {
        let seq = self.seq(slot)?.clone();
        // A sequence without blocks may be probed for before it has a slot.
        let from = (!seq.blocks.is_empty() || max_tokens.is_multiple_of(2)).then_some(slot);
        (from.is_some() || !seq.is_broken).then_some(())?;
        let matched = self.probe(from, &seq.content, max_tokens);
        self.kv.adopt(row(slot));
        let seq = self.seq_mut(slot);
        seq.num_shared += matched.len();
        seq.blocks.extend(matched);
        Some(())
    }

    /// Match for `content`, from the blocks of `slot` on if there is one. Returns the blocks.
    fn probe(&mut self, slot: Option<usize>, content: &Content, max_tokens: usize) -> Vec<u32> {
        let (key, tokens) = key(content);
        let probe = match slot {
            Some(slot) => self.kv.probe_from(row(slot), key, tokens, max_tokens),
            None => self.kv.probe(key, tokens, max_tokens),
        };
        let seq = slot.and_then(|slot| self.seq(slot));
        let num_shared = seq.map_or(0, |seq| seq.num_shared);
        let is_broken = seq.is_some_and(|seq| seq.is_broken);
        let is_full = seq.is_some_and(|seq| num_shared < seq.blocks.len());
        let shares = self.model.enable_prefix_caching && !is_broken;
        let mut want = self.model.matched(content, num_shared, max_tokens);
        want.retain(|_| shares && !is_full);
        let num_cached = want.iter().filter(|block| self.model.num_uses(**block) == 0).count();
        let numbers = Probe { num_blocks: want.len() as u32, num_cached: num_cached as u32 };
        assert_eq!(probe, numbers, "probe for {content:?} from {slot:?}");

        let before = seq.and_then(|seq| seq.blocks[..num_shared].last());
        let tail = want.last().or(before).map(|block| BlockId(*block));
        assert_eq!(self.kv.probe_tail(), tail, "tail of the path");
        let next = content.prefix((num_shared + want.len() + 1) * self.model.block_size);
        let next = next.filter(|_| shares);
        let hash = self.kv.probe_next_hash();
        assert_eq!(hash.is_some(), next.is_some(), "next block of {content:?}");
        self.compare_next_hashes(hash.zip(next));
        want
    }

    /// Room for `requested` blocks in the model, or the error that the manager must give.
    fn make_room(&mut self, requested: usize) -> Result<(), OutOfBlocks> {
        let (free, cached) = (self.model.free().len(), self.model.cached().len());
        if requested > free + cached {
            return Err(OutOfBlocks { requested, free, cached });
        }
        self.model.make_room(requested);
        Ok(())
    }

    fn allocate(&mut self, slot: usize, n: usize) -> Option<()> {
        let num_before = self.seq(slot)?.blocks.len();
        (num_before + n <= self.kv.max_blocks_per_seq).then_some(())?;
        let want = self.make_room(n);
        assert_eq!(self.kv.allocate(row(slot), n), want);
        if want.is_ok() {
            let free = self.model.free();
            let new = self.table(slot).split_off(num_before);
            assert_eq!(new.len(), n);
            assert!(new.iter().all(|block| free.contains(block)), "{new:?} of {free:?}");
            self.seq_mut(slot).blocks.extend(new);
        }
        Some(())
    }

    fn share(&mut self, slot: usize, num_full: usize) -> Option<()> {
        let seq = self.seq(slot)?.clone();
        let num_known = seq.content.tokens.len() / self.model.block_size;
        let num_full = num_full.min(seq.blocks.len()).min(num_known);
        let step = StepId(self.planned);
        let (key, tokens) = key(&seq.content);
        self.kv.share(row(slot), key, tokens, num_full, step);
        self.model.share(slot, num_full, step);
        Some(())
    }

    fn fork(&mut self, from: usize, to: usize) -> Option<()> {
        let source = self.seq(from)?.clone();
        let target = self.seq(to)?;
        let same_namespace = target.content.namespace == source.content.namespace;
        (target.blocks.is_empty() && from != to && same_namespace).then_some(())?;
        self.kv.fork(row(from), row(to));
        self.model.seqs[to] = Some(source);
        Some(())
    }

    /// Returns whether the block is the slot's own now.
    fn copy_on_write(&mut self, slot: usize, index: usize) -> bool {
        let source = self.seq(slot).expect("open").blocks[index];
        if self.model.num_uses(source) == 1 {
            assert_eq!(self.kv.copy_on_write(row(slot), index), Ok(None));
            return true;
        }
        let want = self.make_room(1);
        match self.kv.copy_on_write(row(slot), index) {
            Ok(Some((from, to))) => {
                assert_eq!((Ok(()), from.0), (want, source));
                assert!(self.model.free().contains(&to.0), "{to:?} was free");
                self.seq_mut(slot).blocks[index] = to.0;
                true
            }
            Ok(None) => panic!("block {source} of slot {slot} is used by others and not copied"),
            Err(error) => {
                assert_eq!(Err(error), want);
                false
            }
        }
    }

    fn generate(&mut self, slot: usize, tokens: &[Token]) -> Option<()> {
        let seq = self.seq(slot)?;
        let first = seq.content.tokens.len() / self.model.block_size;
        for index in (first..seq.blocks.len()).rev() {
            if !self.copy_on_write(slot, index) {
                return Some(());
            }
        }
        self.seq_mut(slot).content.tokens.extend(tokens);
        Some(())
    }

    fn table(&self, slot: usize) -> Vec<u32> {
        self.kv.table(row(slot)).iter().map(|block| *block as u32).collect()
    }

    /// Compare all that can be seen.
    pub(super) fn compare(&mut self) {
        self.kv.check();
        let (free, cached) = (self.model.free().len(), self.model.cached().len());
        let counts = self.kv.counts();
        assert_eq!((counts.free, counts.cached), (free, cached), "free and cached");
        assert_eq!(counts.capacity, self.model.num_blocks as usize, "capacity");
        assert_eq!(counts.free + counts.held + counts.cached, counts.capacity, "conservation");
        assert_eq!(self.kv.available(), free + cached, "available");
        assert_eq!(self.kv.num_evicted_blocks(), self.model.num_evicted, "evicted");
        (0..NUM_SLOTS).for_each(|slot| self.compare_slot(slot));
        self.compare_next_hashes(None);
        self.compare_snapshot();
    }

    fn compare_slot(&self, slot: usize) {
        let Some(seq) = self.seq(slot) else {
            assert!(!self.kv.is_open(row(slot)), "slot {slot} is closed");
            assert_eq!(self.table(slot), [0; 0], "table of closed slot {slot}");
            return;
        };
        assert!(self.kv.is_open(row(slot)), "slot {slot} is open");
        assert_eq!(self.table(slot), seq.blocks, "table of slot {slot}");
        assert_eq!(self.kv.num_blocks_of(row(slot)), seq.blocks.len(), "blocks of slot {slot}");
        for (index, block) in seq.blocks.iter().enumerate() {
            let num_uses = self.kv.num_uses(row(slot), index);
            assert_eq!(num_uses as usize, self.model.num_uses(*block), "uses of block {block}");
        }
        let first = slot * self.kv.max_blocks_per_seq;
        let in_place = &self.kv.block_tables()[first..first + seq.blocks.len()];
        assert_eq!(in_place, self.kv.table(row(slot)), "table of slot {slot} in place");
        assert_eq!(self.kv.num_shared(row(slot)), seq.num_shared, "shared blocks of slot {slot}");
        assert_eq!(self.kv.is_broken(row(slot)), seq.is_broken, "slot {slot} is broken");
        let tail = seq.blocks[..seq.num_shared].last();
        assert_eq!(self.kv.tail(row(slot)), tail.map(|block| BlockId(*block)), "tail of {slot}");
        let node = tail.and_then(|tail| self.model.nodes.iter().find(|node| node.block == *tail));
        let pending = node.map(|node| node.step).filter(|step| step.0 > self.committed);
        assert_eq!(self.kv.pending_step(row(slot)), pending, "pending step of slot {slot}");
        for other in 0..NUM_SLOTS {
            let blocks = self.seq(other).map_or(&[][..], |seq| &seq.blocks);
            let common = seq.blocks.iter().zip(blocks).take_while(|(a, b)| a == b).count();
            for limit in [0, 1, 2, 3, 100] {
                let num = self.kv.num_shared_leading(row(slot), row(other), limit);
                assert_eq!(num, common.min(limit), "slots {slot} and {other}, limit {limit}");
            }
        }
    }

    /// Next blocks have equal hashes where they are equal, and nowhere else.
    fn compare_next_hashes(&self, also: Option<(u64, Prefix)>) {
        let mut nexts = Vec::from_iter(also);
        for slot in 0..NUM_SLOTS {
            let Some(seq) = self.seq(slot) else { continue };
            let (key, tokens) = key(&seq.content);
            let hash = self.kv.next_block_hash(row(slot), key, tokens);
            let next = seq.content.prefix((seq.num_shared + 1) * self.model.block_size);
            let next = next.filter(|_| self.model.enable_prefix_caching && !seq.is_broken);
            assert_eq!(hash.is_some(), next.is_some(), "next block of slot {slot}");
            nexts.extend(hash.zip(next));
        }
        for (hash, next) in &nexts {
            for (other_hash, other) in &nexts {
                assert!(hash == other_hash || next != other, "equal blocks, unequal hashes");
                assert!(hash != other_hash || next == other || !self.hashes_tell, "collision");
            }
        }
    }

    /// The snapshot is the model's tree, and so is what a listener knows.
    fn compare_snapshot(&mut self) {
        let mut events = vec![BlockEvent::Cleared];
        self.kv.take_events(&mut events);
        for event in events {
            self.hear(event);
        }
        let snapshot = self.kv.snapshot();
        assert_eq!(snapshot.len(), self.model.nodes.len(), "nodes");
        let mut listed = BTreeMap::new();
        for info in snapshot {
            let node = self.model.nodes.iter().find(|node| node.block == info.block.0);
            let node = node.expect("a node of the model");
            assert_eq!(info.namespace, node.prefix.namespace, "{info:?}");
            assert_eq!(info.num_uses as usize, self.model.num_uses(node.block), "{info:?}");
            let hash = chain_hash(&node.prefix, self.model.block_size);
            assert_eq!(info.hash, Some(hash), "{info:?}");
            let parent = info.parent.map(|parent| listed[&parent]);
            let heard = self.heard[&info.block];
            assert_eq!(heard, (hash, parent, node.prefix.namespace), "{info:?}");
            let above = node.prefix.tokens.len() - self.model.block_size;
            assert_eq!(parent.is_some(), above > 0, "{info:?}");
            listed.insert(info.block, hash);
        }
        assert_eq!(self.heard.len(), listed.len(), "blocks that a listener knows");
    }

    fn hear(&mut self, event: BlockEvent) {
        match event {
            BlockEvent::Stored { block, hash, parent, namespace, .. } => {
                let is_known = |parent| self.heard.values().any(|(known, ..)| *known == parent);
                assert!(parent.is_none_or(is_known), "{event:?} before its parent");
                let before = self.heard.insert(block, (hash, parent, namespace));
                assert_eq!(before, None, "{event:?}");
            }
            BlockEvent::Removed { block, hash, .. } => {
                let before = self.heard.remove(&block).map(|(known, ..)| known);
                assert_eq!(before, Some(hash), "{event:?}");
                let has_child = self.heard.values().any(|(_, parent, _)| *parent == Some(hash));
                assert!(!has_child, "{event:?} before its children");
            }
            BlockEvent::Cleared => self.heard.clear(),
        }
    }
}

fn row(slot: usize) -> RowSlot {
    RowSlot(slot as u32)
}

fn key(content: &Content) -> (SeqKey<'_>, &[Token]) {
    (SeqKey { namespace: content.namespace, spans: &content.spans }, &content.tokens)
}

/// The documented chain hash, from the whole prefix.
fn chain_hash(prefix: &Prefix, block_size: usize) -> ChainHash {
    let mut parent: Option<[u8; 16]> = None;
    for (index, block) in prefix.tokens.chunks(block_size).enumerate() {
        let mut bytes = vec![u8::from(parent.is_some())];
        bytes.extend(parent.unwrap_or(prefix.namespace.0.to_be_bytes()));
        bytes.extend((block_size as u32).to_le_bytes());
        bytes.extend(block.iter().flat_map(|token| token.to_le_bytes()));
        let (start, end) = (index * block_size, (index + 1) * block_size);
        for span in &prefix.spans {
            if (span.start as usize) < end && span.end as usize > start {
                bytes.extend(span.start.to_le_bytes());
                bytes.extend(span.end.to_le_bytes());
                bytes.extend(span.digest.to_le_bytes());
            }
        }
        parent = Sha256::digest(bytes)[..16].try_into().ok();
    }
    ChainHash(parent.map_or(0, u128::from_be_bytes))
}
