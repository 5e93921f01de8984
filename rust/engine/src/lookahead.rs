//! Asking memory ahead for what a step is going to touch.
//!
//! With thousands of rows and millions of blocks little of a row's state is in the cache when its turn
//! comes, and one load tells where the next one goes: row, sequence, tokens; table, node, link. Here
//! all rows take each of these stages together. That is all: leaving any of it out changes no plan.

use fastserve_base::RowSlot;
use fastserve_kv::SeqKey;
use prefetch_index::prefetch_index;

use crate::core::{Core, FlightOutput};
use crate::tail::TAIL;

/// Outputs between the stages of [`Core::look_ahead_of_output`]: about the time of a load.
const DISTANCE: usize = 8;

impl Core {
    /// Before the pass: counts the rows with one token to go, each of which keeps a token of the
    /// budget, and asks for what those that begin or fill a block need.
    pub(crate) fn look_ahead(&mut self) -> u32 {
        let mask = self.config.block_size - 1;
        let shift = self.config.block_size.trailing_zeros();
        let Self { service, rows, sequences, kv, scratch, config, .. } = self;
        let (mut num_decode_rows, mut num_fresh) = (0, 0);
        for slot in service.slots() {
            let row = &rows[slot.index()];
            if !row.is_runnable() || row.remaining() != 1 {
                continue;
            }
            num_decode_rows += 1;
            let offset = row.num_computed & mask;
            if offset == 0 || offset == mask {
                kv.prefetch_table(slot, (row.num_computed >> shift) as usize);
            }
            num_fresh += usize::from(offset == 0);
            if offset == mask && row.num_pending == 0 && config.enable_prefix_caching {
                sequences.prefetch(row.sequence);
                scratch.filling.push(slot);
            }
        }
        self.kv.prefetch_evictions(num_fresh);
        self.look_ahead_of_shares();
        num_decode_rows
    }

    /// Rows that fill a block, which goes into the prefix tree.
    fn look_ahead_of_shares(&mut self) {
        let Self { rows, requests, sequences, kv, scratch, config, .. } = self;
        let sequence_of = |slot: RowSlot| &sequences[rows[slot.index()].sequence];
        for &slot in &scratch.filling {
            let sequence = sequence_of(slot);
            requests.prefetch(sequence.request);
            let filled = sequence.tokens.len().saturating_sub(config.block_size as usize);
            prefetch_index(&sequence.tokens, filled);
            kv.prefetch_tail(slot);
        }
        for slot in scratch.filling.drain(..) {
            let sequence = sequence_of(slot);
            let request = &requests[sequence.request].request;
            let key = SeqKey { namespace: request.namespace, spans: &request.spans };
            let full = sequence.tokens.len() / config.block_size as usize;
            kv.prefetch_share(slot, key, &sequence.tokens, full);
        }
    }

    /// While the results of a step are taken in: a later output's token may fill its row's tail, which
    /// then moves.
    #[inline]
    pub(crate) fn look_ahead_of_output(&self, outputs: &[FlightOutput], at: usize) {
        let filled = |output: &&FlightOutput| {
            (self.rows[output.slot.index()].num_known + 1).is_multiple_of(TAIL)
        };
        let sequence_of = |output: &FlightOutput| self.rows[output.slot.index()].sequence;
        if let Some(output) = outputs.get(at + 2 * DISTANCE).filter(filled) {
            self.sequences.prefetch(sequence_of(output));
        }
        let near = outputs.get(at + DISTANCE).filter(filled);
        if let Some(sequence) = near.and_then(|output| self.sequences.get(sequence_of(output))) {
            prefetch_index(&sequence.tokens, sequence.tokens.len());
        }
    }
}
