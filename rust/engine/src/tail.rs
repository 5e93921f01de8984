//! Tokens just accepted, beside the rows.
//!
//! A sequence's tokens are a vector of its own, so that every row's next token goes to another page of
//! memory. The last ones wait here, all rows' together, and move when [`TAIL`] are full or somebody
//! wants to see them: [`Core::store_tail`] comes before any look at a running sequence's tokens.

use fastserve_base::{RowSlot, Token};

use crate::core::Core;

/// Tokens that wait: at positions that are multiples of this they move.
pub(crate) const TAIL: u32 = 16;

/// The tail of one row: its token at `position` is at `position % TAIL`.
pub(crate) type Tail = [Token; TAIL as usize];

impl Core {
    /// Append an accepted token to the row's sequence.
    #[inline]
    pub(crate) fn push_token(&mut self, slot: RowSlot, token: Token) {
        let row = &mut self.rows[slot.index()];
        self.tails[slot.index()][(row.num_known % TAIL) as usize] = token;
        row.num_known += 1;
        row.last_token = token;
        if row.num_known.is_multiple_of(TAIL) {
            self.store_tail(slot);
        }
    }

    /// Move the row's tail to its sequence. A row without a sequence has none.
    #[inline]
    pub(crate) fn store_tail(&mut self, slot: RowSlot) {
        let row = &self.rows[slot.index()];
        let name = &mut self.names[slot.index()];
        let count = row.num_known - name.num_stored;
        if count == 0 {
            return;
        }
        let first = (name.num_stored % TAIL) as usize;
        name.num_stored = row.num_known;
        let tail = &self.tails[slot.index()][first..first + count as usize];
        let sequence = &mut self.sequences[row.sequence];
        sequence.tokens.extend_from_slice(tail);
        // With a token it has got somewhere, which failed steps may not keep it from for ever.
        sequence.num_failures = 0;
    }
}
