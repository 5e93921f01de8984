//! One pass over the waiting sequences, best first, while slots, budget and blocks last.
//!
//! A sequence is admitted when the pool has room for all the tokens it has, beside what the running
//! ones still need for theirs and the watermark. Nothing else running, it is admitted with what there
//! is. One that was preempted waits until another sequence has ended, since nothing else brings its
//! memory back: between two endings each sequence is preempted once at most. The order is strict: the first that does not fit ends the pass, so nobody is overtaken for being
//! large. Only two kinds step aside: one whose next block another row of this step computes (it
//! would do the same work), and a long prompt when long prompts have had their share.

use fastserve_base::fault::{Fault, planted};
use fastserve_base::{Nanos, RowSlot};
use fastserve_kv::{Probe, SeqKey};
use fastserve_sched::rows::flags;
use fastserve_sched::{Assignment, OrderKey, Row, Status};

use crate::core::Core;
use crate::outputs::EventKind;
use crate::schedule::{Pass, match_limit};

/// Sequences that may step aside in one step.
pub(crate) const MAX_DEFERRED: usize = 256;

/// What to do with the first sequence of the queue.
enum Verdict {
    Admit(Probe),
    /// Let the next one try.
    StepAside,
    /// Nobody else either.
    Stop,
}

impl Core {
    /// The pass. Admitted rows have their first tokens and blocks.
    pub(crate) fn admit(&mut self, pass: &mut Pass<'_>) {
        while let Some((key, sequence)) = self.waiting.peek() {
            if self.free_slots.is_empty()
                || pass.budget.tokens_left() == 0
                || self.scratch.deferred.len() == MAX_DEFERRED
            {
                break;
            }
            match self.judge(pass, sequence) {
                Verdict::Admit(probe) => {
                    self.waiting.pop();
                    self.admit_one(pass, key, sequence, probe);
                }
                Verdict::StepAside => {
                    self.waiting.pop();
                    self.scratch.deferred.push((key, sequence));
                }
                Verdict::Stop => break,
            }
        }
        for at in 0..self.scratch.deferred.len() {
            let (key, sequence) = self.scratch.deferred[at];
            let since = self.requests[self.sequences[sequence].request].queued_at;
            self.waiting.push(key, since, sequence);
        }
        self.scratch.deferred.clear();
    }

    fn judge(&mut self, pass: &mut Pass<'_>, sequence: u32) -> Verdict {
        let state = &self.sequences[sequence];
        let request = &self.requests[state.request].request;
        let num_tokens = state.tokens.len();
        let words = request.sampling.len() + num_tokens;
        let blocks = num_tokens.div_ceil(self.config.block_size as usize);
        if pass.writer.event_words_left() < words || self.edits_left(pass) < blocks {
            return Verdict::Stop;
        }
        let alone = self.service.is_empty() && self.scratch.joining.is_empty();
        if state.preempted_at == Some(self.num_endings) && !alone {
            return Verdict::Stop;
        }
        let limit = match_limit(state, request.score_prompt);
        let key = SeqKey { namespace: request.namespace, spans: &request.spans };
        let probe = self.kv.probe(key, &state.tokens, limit);
        let matched = (probe.num_blocks * self.config.block_size) as usize;
        if matched + self.config.block_size as usize <= limit {
            let next = self.kv.probe_next_hash();
            let nobody = RowSlot(u32::MAX);
            if let Some(leader) = next.and_then(|hash| self.leader(pass, hash, nobody)) {
                self.note_follower(sequence, leader);
                return Verdict::StepAside;
            }
        }
        let remaining = (num_tokens - matched) as u32;
        let start = matched as u32;
        if pass.budget.chunk_room(self.is_long(remaining), start) == 0 {
            let long_had_their_share = pass.budget.chunk_room(false, start) > 0;
            return if long_had_their_share { Verdict::StepAside } else { Verdict::Stop };
        }
        let needed = blocks - probe.num_blocks as usize;
        let available = self.kv.available() - probe.num_cached as usize;
        let fits = if alone {
            available > 0
        } else {
            let reserved = pass.outstanding_blocks + self.config.watermark_blocks as usize;
            available >= needed + reserved
        };
        if fits { Verdict::Admit(probe) } else { Verdict::Stop }
    }

    fn admit_one(&mut self, pass: &mut Pass<'_>, key: OrderKey, sequence: u32, probe: Probe) {
        self.sequences[sequence].key = key;
        let slot = self.assign(pass, sequence);
        self.kv.adopt(slot);
        self.scratch.matched += probe.num_blocks as usize;
        let sibling = self.sibling(slot, probe.num_blocks as usize);
        let matched = probe.num_blocks * self.config.block_size;
        let row = &mut self.rows[slot.index()];
        row.num_computed = matched;
        row.num_offered = probe.num_blocks;
        let is_first = self.sequences[sequence].num_cached_tokens.is_none();
        if is_first && self.config.enable_prefix_caching {
            self.stats.prefix_cache_queries += self.sequences[sequence].tokens.len() as u64;
        }
        self.count_hits(slot, 0, matched);
        self.note_admitted(sequence, slot, matched);
        self.scratch.joining.push((slot, sibling));
        self.schedule_chunk(pass, None, slot);
    }

    fn note_admitted(&mut self, sequence: u32, slot: RowSlot, cached: u32) {
        let state = &mut self.sequences[sequence];
        state.follows = false;
        let (seq, request) = (state.id, state.request);
        let state = &mut self.requests[request];
        if !state.was_admitted {
            state.was_admitted = true;
            self.num_queued_requests -= 1;
            self.num_queued_tokens -= u64::from(state.num_prompt_tokens);
        }
        self.note(seq, EventKind::Admitted { cached, slot: slot.0 });
    }

    /// Give a sequence a row slot, and tell the device whose it is.
    pub(crate) fn assign(&mut self, pass: &mut Pass<'_>, sequence: u32) -> RowSlot {
        let slot = self.free_slots.pop().expect("a slot is free");
        let state = &mut self.sequences[sequence];
        state.status = Status::Running(slot);
        let place = &self.requests[state.request];
        let request = &place.request;
        self.kv.open(slot, request.namespace);
        self.is_released[slot.index()] = false;

        let limit = state.num_prompt_tokens.saturating_add(request.max_tokens);
        let mut row = Row {
            sequence,
            num_known: state.tokens.len() as u32,
            limit: limit.min(self.config.max_model_len),
            stops_from: state.num_prompt_tokens.saturating_add(request.min_tokens),
            last_token: state.tokens[state.tokens.len() - 1],
            high_water: state.high_water,
            ..Row::EMPTY
        };
        match request.stop_token_ids[..] {
            [] => {}
            [only] => row.stop_token = only,
            [..] => row.flags |= flags::MANY_STOPS,
        }
        if request.score_prompt && state.num_output_tokens() == 0 {
            row.flags |= flags::SCORE;
        }
        if place.num_spawned < request.num_sequences {
            row.flags |= flags::UNFORKED;
        }
        self.rows[slot.index()] = row;
        let name = &mut self.names[slot.index()];
        name.seq = state.id;
        name.num_prompt_tokens = state.num_prompt_tokens;
        name.num_cached_tokens = state.num_cached_tokens.unwrap_or(0);
        name.num_edited = 0;
        name.num_stored = row.num_known;
        name.claim = 0;
        if !planted(Fault::StaleRowSlot) {
            pass.writer.assigned(&Assignment {
                slot: slot.0,
                seq: state.id,
                num_prompt_tokens: state.num_prompt_tokens,
                adapter: request.adapter,
                sampling: &request.sampling,
                tokens: &state.tokens,
            });
        }
        slot
    }

    /// A running row that shares the deepest of the row's matched blocks.
    fn sibling(&self, slot: RowSlot, num_blocks: usize) -> Option<RowSlot> {
        let table = self.kv.table(slot);
        (0..num_blocks).rev().take(64).find_map(|index| {
            let block = table[index];
            let user = self.block_user[block as usize];
            let shares = user != slot
                && self.rows.get(user.index()).is_some_and(|row| row.sequence != u32::MAX)
                && self.kv.table(user).get(index) == Some(&block);
            shares.then_some(user)
        })
    }

    /// Let those that got a slot in this step stand among the running rows.
    pub(crate) fn settle_joining(&mut self) {
        for at in 0..self.scratch.joining.len() {
            let (slot, sibling) = self.scratch.joining[at];
            let state = &self.sequences[self.rows[slot.index()].sequence];
            let since = self.requests[state.request].queued_at;
            let ages_at =
                self.config.max_wait.map_or(Nanos::MAX, |wait| since.saturating_add(wait));
            self.service.insert(state.key, slot, ages_at);
            let Self { kv, order, rows, config, .. } = self;
            order.insert(slot, sibling, |a, b| {
                // Whole blocks only: a partial one is about to be copied.
                let computed = rows[a.index()].num_computed.min(rows[b.index()].num_computed);
                kv.num_shared_leading(a, b, (computed / config.block_size) as usize) as u32
            });
        }
        self.scratch.joining.clear();
    }
}
