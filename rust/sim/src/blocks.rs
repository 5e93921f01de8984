//! Block events, replayed: what a router would believe, against what the core holds and what the
//! blocks contain.

use std::collections::{BTreeMap, BTreeSet};

use fastserve_base::CoreConfig;
use fastserve_engine::Core;
use fastserve_kv::{BlockEvent, ChainHash};

use crate::check::Flight;
use crate::device::Device;
use crate::ledger::Ledger;
use crate::model::Prefix;
use crate::violation::{Check, ensure};

/// A listener to block events.
#[derive(Debug, Clone)]
pub struct BlockWatch {
    enabled: bool,
    stored: BTreeMap<u32, ChainHash>,
    meanings: BTreeMap<ChainHash, Prefix>,
    events: Vec<BlockEvent>,
}

impl BlockWatch {
    /// Nothing is stored.
    pub fn new(config: &CoreConfig) -> Self {
        Self {
            enabled: config.enable_block_events,
            stored: BTreeMap::new(),
            meanings: BTreeMap::new(),
            events: Vec::new(),
        }
    }

    /// After a plan: whoever was admitted has matched all that was stored before it, and is still.
    ///
    /// # Errors
    ///
    /// A sequence that could have matched one block more.
    pub fn check_matches(
        &self,
        core: &Core,
        device: &Device,
        ledger: &Ledger,
        flight: &Flight,
    ) -> Check {
        if !self.enabled {
            return Ok(());
        }
        let block_size = device.block_size;
        let last = |block: u32| &device.kv[(block as usize + 1) * block_size - 1];
        let stored: BTreeSet<Prefix> = core
            .snapshot()
            .iter()
            .filter(|info| self.stored.get(&info.block.0) == info.hash.as_ref())
            .map(|info| last(info.block.0))
            .filter(|kv| kv.step < flight.step)
            .map(|kv| kv.prefix)
            .collect();
        for &(seq, start) in &flight.admissions {
            let end = start + block_size;
            let prefixes = &ledger.seqs[seq].stream.prefixes;
            // Spans of one digest and different lengths are different keys.
            if ledger.has_spans(seq) {
                continue;
            }
            ensure!(
                end > ledger.match_limit(seq) || !stored.contains(&prefixes[end - 1]),
                "longest match",
                "{} matched {start} tokens, a block with {end} was there",
                ledger.name(seq)
            );
        }
        Ok(())
    }

    /// Hear the news, and compare.
    ///
    /// # Errors
    ///
    /// An event that does not fit the ones before it, or a block that differs.
    pub fn check(&mut self, core: &mut Core, device: &Device) -> Check {
        if !self.enabled {
            return Ok(());
        }
        core.take_block_events(&mut self.events);
        let events = std::mem::take(&mut self.events);
        for &event in &events {
            self.hear(event)?;
        }
        self.events = events;
        let snapshot: BTreeMap<u32, ChainHash> = core
            .snapshot()
            .iter()
            .filter_map(|info| info.hash.map(|hash| (info.block.0, hash)))
            .collect();
        ensure!(
            snapshot == self.stored,
            "block events",
            "events say {:?}, the snapshot {snapshot:?}",
            self.stored
        );
        self.check_meanings(device)
    }

    fn hear(&mut self, event: BlockEvent) -> Check {
        match event {
            BlockEvent::Stored { block, hash, parent, .. } => {
                let known = parent.is_none_or(|parent| self.stored.values().any(|&h| h == parent));
                let new = self.stored.insert(block.0, hash).is_none();
                ensure!(known && new, "block events", "{event:?} does not fit {:?}", self.stored);
            }
            BlockEvent::Removed { block, hash, .. } => {
                let removed = self.stored.remove(&block.0);
                ensure!(removed == Some(hash), "block events", "{event:?} after {removed:?}");
            }
            BlockEvent::Cleared => self.stored.clear(),
        }
        Ok(())
    }

    /// One hash, one prefix, whenever and wherever it is stored.
    fn check_meanings(&mut self, device: &Device) -> Check {
        for (&block, &hash) in &self.stored {
            let kv = &device.kv[(block as usize + 1) * device.block_size - 1];
            let meaning = *self.meanings.entry(hash).or_insert(kv.prefix);
            ensure!(
                meaning == kv.prefix,
                "block events",
                "block {block} has a hash that once stood for another prefix"
            );
        }
        Ok(())
    }
}
