//! Writes a plan into an arena, section by section.
//!
//! The arena is split into its sections once a step; after that a word costs a bounds check and a
//! store. Counts go into the header when the plan is finished.

use fastserve_base::{OutputKind, SeqId, StepId, Ticket, Token};

use crate::plan::{
    COPY_WORDS, Header, PLAN_VERSION, PlanLayout, SLOT_EVENT_WORDS, Section, TABLE_EDIT_WORDS,
    TIER_COPY_WORDS, with_sections,
};

/// A section that fills from its start.
#[derive(Debug)]
struct Fill<'a> {
    words: &'a mut [i32],
    used: usize,
}

impl Fill<'_> {
    #[inline]
    fn push(&mut self, word: i32) {
        self.words[self.used] = word;
        self.used += 1;
    }

    #[inline]
    fn extend(&mut self, words: &[i32]) {
        self.words[self.used..self.used + words.len()].copy_from_slice(words);
        self.used += words.len();
    }

    /// The next `words` words, to be filled by the caller.
    #[inline]
    fn take(&mut self, words: usize) -> &mut [i32] {
        let begin = self.used;
        self.used += words;
        &mut self.words[begin..self.used]
    }

    fn left(&self) -> usize {
        self.words.len() - self.used
    }
}

/// What is left of an arena while it is split.
struct Rest<'a> {
    words: &'a mut [i32],
    /// Where `words` begins in the arena.
    begin: usize,
}

impl<'a> Rest<'a> {
    /// The words of `section`. Sections come in the order of the layout.
    fn take(&mut self, section: Section) -> &'a mut [i32] {
        let words = std::mem::take(&mut self.words);
        let (_, words) = words.split_at_mut(section.offset - self.begin);
        let (words, rest) = words.split_at_mut(section.capacity);
        *self = Self { words: rest, begin: section.offset + section.capacity };
        words
    }
}

macro_rules! writer {
    (header, $($name:ident),* $(,)?) => {
        /// A plan being written.
        #[derive(Debug)]
        pub struct PlanWriter<'a> {
            header: &'a mut [i32],
            $($name: Fill<'a>,)*
        }

        impl<'a> PlanWriter<'a> {
            /// Begin a plan. `arena` holds at least `layout.words` words.
            pub fn new(layout: &PlanLayout, arena: &'a mut [i32]) -> Self {
                let mut rest = Rest { words: arena, begin: 0 };
                Self {
                    header: rest.take(layout.header),
                    $($name: Fill { words: rest.take(layout.$name), used: 0 },)*
                }
            }
        }
    };
}

with_sections!(writer);

/// What a slot's new sequence brings, once.
#[derive(Debug, Clone, Copy)]
pub struct Assignment<'a> {
    /// The slot.
    pub slot: u32,
    /// The sequence.
    pub seq: SeqId,
    /// Tokens of the prompt.
    pub num_prompt_tokens: u32,
    /// Adapter, 0 for none.
    pub adapter: u32,
    /// Sampling record.
    pub sampling: &'a [i32],
    /// Tokens so far.
    pub tokens: &'a [Token],
}

impl PlanWriter<'_> {
    /// Begin a row: its tokens follow.
    #[inline]
    pub fn row(&mut self, slot: u32, seq_len: u32, num_shared_blocks: u32) {
        self.row_slots.push(slot as i32);
        self.query_indptr.push(self.token_ids.used as i32);
        self.seq_lens.push(seq_len as i32);
        self.num_shared_blocks.push(num_shared_blocks as i32);
    }

    /// One token of the row begun last.
    #[inline]
    pub fn token(&mut self, word: i32, position: u32, place: i32) {
        self.token_ids.push(word);
        self.positions.push(position as i32);
        self.slot_mapping.push(place);
    }

    /// Known tokens of the row begun last, from position `start` on, whose blocks `table` lists.
    pub fn tokens(&mut self, tokens: &[Token], start: u32, table: &[i32], block_size: u32) {
        let (token_ids, positions, slots) =
            (&mut self.token_ids, &mut self.positions, &mut self.slot_mapping);
        for (word, &token) in token_ids.take(tokens.len()).iter_mut().zip(tokens) {
            *word = token as i32;
        }
        for (word, position) in positions.take(tokens.len()).iter_mut().zip(start as i32..) {
            *word = position;
        }
        let mut rest = slots.take(tokens.len());
        let mut position = start;
        while !rest.is_empty() {
            let offset = position % block_size;
            let block = table[(position / block_size) as usize];
            let run = ((block_size - offset) as usize).min(rest.len());
            let (words, tail) = rest.split_at_mut(run);
            let first = block * block_size as i32 + offset as i32;
            for (word, place) in words.iter_mut().zip(first..) {
                *word = place;
            }
            position += run as u32;
            rest = tail;
        }
    }

    /// An output of the token written last, or of one `back` places before it.
    #[inline]
    pub fn output(&mut self, back: u32, slot: u32, kind: OutputKind) {
        self.out_rows.push((self.token_ids.used - 1) as i32 - back as i32);
        self.out_slots.push(slot as i32);
        self.out_kinds.push(kind as i32);
    }

    /// A change of a block table.
    #[inline]
    pub fn table_edit(&mut self, slot: u32, index: u32, block: i32) {
        self.table_edits.extend(&[slot as i32, index as i32, block]);
    }

    /// A copy of one block onto another.
    pub fn copy(&mut self, source: u32, destination: u32) {
        self.copies.extend(&[source as i32, destination as i32]);
    }

    /// A copy of a block to a place in another tier. False: the section is full.
    pub fn copy_out(&mut self, block: i32, place: u32, ticket: Ticket) -> bool {
        push_tier_copy(&mut self.copies_out, block, place, ticket)
    }

    /// A copy of a block from a place in another tier. False: the section is full.
    pub fn copy_in(&mut self, block: i32, place: u32, ticket: Ticket) -> bool {
        push_tier_copy(&mut self.copies_in, block, place, ticket)
    }

    /// Copies to and from another tier so far.
    pub fn num_tier_copies(&self) -> u32 {
        ((self.copies_out.used + self.copies_in.used) / TIER_COPY_WORDS) as u32
    }

    /// A slot has no sequence any more.
    pub fn released(&mut self, slot: u32) {
        let mut event = [0; SLOT_EVENT_WORDS];
        event[0] = 2;
        event[1] = slot as i32;
        self.slot_events.extend(&event);
    }

    /// A slot has a new sequence.
    pub fn assigned(&mut self, assignment: &Assignment<'_>) {
        let Assignment { slot, seq, num_prompt_tokens, adapter, sampling, tokens } = *assignment;
        let mut event = [0; SLOT_EVENT_WORDS];
        event[0] = 1;
        event[1] = slot as i32;
        event[2] = seq.request.0 as u32 as i32;
        event[3] = (seq.request.0 >> 32) as u32 as i32;
        event[4] = seq.index as i32;
        event[5] = num_prompt_tokens as i32;
        event[6] = tokens.len() as i32;
        event[7] = self.event_words.used as i32;
        event[8] = sampling.len() as i32;
        event[9] = adapter as i32;
        self.slot_events.extend(&event);
        self.event_words.extend(sampling);
        let Fill { words, used } = &mut self.event_words;
        for (word, &token) in words[*used..*used + tokens.len()].iter_mut().zip(tokens) {
            *word = token as i32;
        }
        *used += tokens.len();
    }

    /// Words that assignments may still bring.
    pub fn event_words_left(&self) -> usize {
        self.event_words.left()
    }

    /// Table edits that still fit.
    pub fn table_edits_left(&self) -> usize {
        self.table_edits.left() / TABLE_EDIT_WORDS
    }

    /// Rows so far.
    pub fn num_rows(&self) -> u32 {
        self.row_slots.used as u32
    }

    /// Tokens so far.
    pub fn num_tokens(&self) -> u32 {
        self.token_ids.used as u32
    }

    /// Outputs so far.
    pub fn num_outputs(&self) -> u32 {
        self.out_rows.used as u32
    }

    /// Write the header. The plan is whole.
    pub fn finish(mut self, step: StepId) {
        self.query_indptr.push(self.token_ids.used as i32);
        self.header.fill(0);
        for (field, value) in [
            (Header::Version, PLAN_VERSION),
            (Header::StepLow, step.0 as u32 as i32),
            (Header::StepHigh, (step.0 >> 32) as u32 as i32),
            (Header::NumRows, self.row_slots.used as i32),
            (Header::NumTokens, self.token_ids.used as i32),
            (Header::NumOutputs, self.out_rows.used as i32),
            (Header::NumTableEdits, (self.table_edits.used / TABLE_EDIT_WORDS) as i32),
            (Header::NumSlotEvents, (self.slot_events.used / SLOT_EVENT_WORDS) as i32),
            (Header::NumEventWords, self.event_words.used as i32),
            (Header::NumCopiesOut, (self.copies_out.used / TIER_COPY_WORDS) as i32),
            (Header::NumCopiesIn, (self.copies_in.used / TIER_COPY_WORDS) as i32),
            (Header::NumCopies, (self.copies.used / COPY_WORDS) as i32),
        ] {
            self.header[field as usize] = value;
        }
    }
}

fn push_tier_copy(section: &mut Fill<'_>, block: i32, place: u32, ticket: Ticket) -> bool {
    if section.left() < TIER_COPY_WORDS {
        return false;
    }
    let (low, high) = (ticket.0 as u32 as i32, (ticket.0 >> 32) as u32 as i32);
    section.extend(&[block, place as i32, low, high]);
    true
}
