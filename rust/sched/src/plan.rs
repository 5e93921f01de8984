//! The plan arena: one step, as int32 words at fixed offsets.
//!
//! The core writes a plan, a runner reads it: Python as numpy views, a device after one copy, the
//! simulator as slices. Offsets are computed here from the configuration, once, and exported; nobody
//! else adds them up. Sections have fixed places, so that a captured graph can replay over them.
//!
//! | section | words | content |
//! |---|---|---|
//! | `header` | 32 | version, step id, counts ([`Header`]) |
//! | `row_slots` | S | row slot of each row |
//! | `query_indptr` | S + 1 | CSR row starts of the step's tokens |
//! | `seq_lens` | S | tokens with K and V after this step; 0 marks a padding row |
//! | `num_shared_blocks` | S | leading blocks equal to the previous row's, all before both rows' queries |
//! | `token_ids` | T | a token, or −1 − slot: that slot's last sample |
//! | `positions` | T | position in the sequence |
//! | `slot_mapping` | T | `block * block_size + offset`; −1: write nothing |
//! | `out_rows` | R | index into the step's tokens whose hidden state is taken; may repeat |
//! | `out_slots` | R | row slot whose sampling state is used |
//! | `out_kinds` | R | [`fastserve_base::OutputKind`] |
//! | `table_edits` | 3 each | slot, index, block |
//! | `slot_events` | 16 each | [`SlotEvent`] |
//! | `event_words` | | sampling records and tokens that the slot events point to |
//! | `copies_out`, `copies_in` | 4 each | block, external slot, ticket (two words) |
//! | `copies` | 2 each | source block, destination block |
//!
//! Before layer 0 a runner applies, in this order: slot events and table edits, `copies_out`,
//! `copies_in`, `copies`.

use std::fmt::Write as _;

use fastserve_base::{CoreConfig, StepId};

/// Version of the layout, in word 0 of the header.
pub const PLAN_VERSION: i32 = 1;
/// Words of the header.
pub const HEADER_WORDS: usize = 32;
/// Words of one slot event.
pub const SLOT_EVENT_WORDS: usize = 16;
/// Words of one table edit.
pub const TABLE_EDIT_WORDS: usize = 3;
/// Words of one copy to or from another tier.
pub const TIER_COPY_WORDS: usize = 4;
/// Words of one copy within the pool.
pub const COPY_WORDS: usize = 2;

/// Where each count stands in the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Header {
    /// [`PLAN_VERSION`].
    Version = 0,
    /// Low half of the step id.
    StepLow = 1,
    /// High half of the step id.
    StepHigh = 2,
    /// S.
    NumRows = 3,
    /// T.
    NumTokens = 4,
    /// R.
    NumOutputs = 5,
    /// Table edits.
    NumTableEdits = 6,
    /// Slot events.
    NumSlotEvents = 7,
    /// Words used in `event_words`.
    NumEventWords = 8,
    /// Copies to another tier.
    NumCopiesOut = 9,
    /// Copies from another tier.
    NumCopiesIn = 10,
    /// Copies within the pool.
    NumCopies = 11,
}

/// A stretch of the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Section {
    /// First word.
    pub offset: usize,
    /// Most words.
    pub capacity: usize,
}

impl Section {
    fn range(self, words: usize) -> std::ops::Range<usize> {
        debug_assert!(words <= self.capacity);
        self.offset..self.offset + words
    }
}

macro_rules! sections {
    ($($name:ident),* $(,)?) => {
        /// Offsets of an arena, a function of the configuration alone.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct PlanLayout {
            /// Words of a whole arena.
            pub words: usize,
            $(
                #[doc = concat!("Section `", stringify!($name), "`.")]
                pub $name: Section,
            )*
        }

        impl PlanLayout {
            fn place(capacity_of: impl Fn(&str) -> usize) -> Self {
                let mut next = 0;
                $(
                    let $name = Section { offset: next, capacity: capacity_of(stringify!($name)) };
                    // Sections begin on 64-byte lines.
                    next += $name.capacity.next_multiple_of(16);
                )*
                Self { words: next, $($name),* }
            }

            /// Every section by name, in order: what a binding exports.
            pub fn sections(&self) -> impl Iterator<Item = (&'static str, Section)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

/// Hand the names of all sections, in order, to another macro: the only list of them.
macro_rules! with_sections {
    ($then:ident) => {
        $then!(
            header,
            row_slots,
            query_indptr,
            seq_lens,
            num_shared_blocks,
            token_ids,
            positions,
            slot_mapping,
            out_rows,
            out_slots,
            out_kinds,
            table_edits,
            slot_events,
            event_words,
            copies_out,
            copies_in,
            copies,
        );
    };
}
pub(crate) use with_sections;

with_sections!(sections);

impl PlanLayout {
    /// The layout for a validated configuration.
    pub fn new(config: &CoreConfig) -> Self {
        let rows = config.max_num_seqs as usize;
        let tokens = config.max_num_batched_tokens as usize;
        let outputs = config.max_num_output_rows as usize;
        let blocks_per_seq = config.max_blocks_per_seq() as usize;
        let model_len = config.max_model_len as usize;
        // Fresh blocks are bounded by the tokens of the step; matched ones by what is kept free here.
        let edits = tokens / config.block_size as usize
            + 2 * rows
            + (4 * blocks_per_seq).max(blocks_per_seq + 4096);
        let event_words = (model_len + config.max_sampling_words as usize).max(1 << 16) + model_len;
        Self::place(|name| match name {
            "header" => HEADER_WORDS,
            "row_slots" | "seq_lens" | "num_shared_blocks" => rows,
            "query_indptr" => rows + 1,
            "token_ids" | "positions" | "slot_mapping" => tokens,
            "out_rows" | "out_slots" | "out_kinds" => outputs,
            "table_edits" => edits * TABLE_EDIT_WORDS,
            "slot_events" => 4 * rows * SLOT_EVENT_WORDS,
            "event_words" => event_words,
            "copies_out" | "copies_in" => 2 * rows * TIER_COPY_WORDS,
            "copies" => rows * COPY_WORDS,
            _ => unreachable!("section {name} has no capacity"),
        })
    }
}

/// A slot event, decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotEvent<'a> {
    /// Whether the slot was assigned; otherwise it was released.
    pub assigned: bool,
    /// The slot.
    pub slot: i32,
    /// The request that owns the sequence.
    pub request: u64,
    /// Which of the request's sequences.
    pub index: u32,
    /// Tokens of the prompt.
    pub num_prompt_tokens: u32,
    /// Adapter, 0 for none.
    pub adapter: i32,
    /// The request's sampling record.
    pub sampling: &'a [i32],
    /// The sequence's tokens so far.
    pub tokens: &'a [i32],
}

/// The slot events of a plan, from its sections `slot_events` and `event_words`.
pub fn slot_events<'a>(
    events: &'a [i32],
    payload: &'a [i32],
) -> impl Iterator<Item = SlotEvent<'a>> {
    events.chunks_exact(SLOT_EVENT_WORDS).map(move |event| {
        let num_tokens = event[6] as usize;
        let offset = event[7] as usize;
        let num_sampling = event[8] as usize;
        let tokens = offset + num_sampling;
        SlotEvent {
            assigned: event[0] == 1,
            slot: event[1],
            request: u64::from(event[2] as u32) | u64::from(event[3] as u32) << 32,
            index: event[4] as u32,
            num_prompt_tokens: event[5] as u32,
            adapter: event[9],
            sampling: &payload[offset..tokens],
            tokens: &payload[tokens..tokens + num_tokens],
        }
    })
}

/// What a runner reads.
#[derive(Debug, Clone, Copy)]
pub struct PlanView<'a> {
    layout: &'a PlanLayout,
    words: &'a [i32],
}

macro_rules! views {
    ($($name:ident: $count:ident * $each:expr, $doc:literal;)*) => {
        $(
            #[doc = $doc]
            pub fn $name(&self) -> &'a [i32] {
                &self.words[self.layout.$name.range(self.count(Header::$count) * $each)]
            }
        )*
    };
}

impl<'a> PlanView<'a> {
    /// Read a plan that `Core::plan` wrote.
    pub fn new(layout: &'a PlanLayout, words: &'a [i32]) -> Self {
        assert_eq!(words[Header::Version as usize], PLAN_VERSION, "plan version");
        Self { layout, words }
    }

    /// One count of the header.
    pub fn count(&self, field: Header) -> usize {
        self.words[self.layout.header.offset + field as usize] as usize
    }

    /// The step this plan is for.
    pub fn step(&self) -> StepId {
        let word = |field: Header| u64::from(self.words[field as usize] as u32);
        StepId(word(Header::StepLow) | word(Header::StepHigh) << 32)
    }

    views! {
        row_slots: NumRows * 1, "Row slot of each row.";
        seq_lens: NumRows * 1, "Tokens with K and V after this step, a row.";
        num_shared_blocks: NumRows * 1, "Leading blocks shared with the previous row.";
        token_ids: NumTokens * 1, "Tokens to compute.";
        positions: NumTokens * 1, "Their positions.";
        slot_mapping: NumTokens * 1, "Where their K and V go.";
        out_rows: NumOutputs * 1, "Tokens whose hidden state is taken.";
        out_slots: NumOutputs * 1, "Row slots whose sampling state is used.";
        out_kinds: NumOutputs * 1, "What is wanted of each output.";
        table_edits: NumTableEdits * TABLE_EDIT_WORDS, "Slot, index, block.";
        event_words: NumEventWords * 1, "What slot events point to.";
        copies_out: NumCopiesOut * TIER_COPY_WORDS, "Copies to another tier.";
        copies_in: NumCopiesIn * TIER_COPY_WORDS, "Copies from another tier.";
        copies: NumCopies * COPY_WORDS, "Source block, destination block.";
    }

    /// CSR row starts, one more than there are rows.
    pub fn query_indptr(&self) -> &'a [i32] {
        &self.words[self.layout.query_indptr.range(self.count(Header::NumRows) + 1)]
    }

    /// Slots assigned and released, in order.
    pub fn slot_events(&self) -> impl Iterator<Item = SlotEvent<'a>> {
        let words = self.count(Header::NumSlotEvents) * SLOT_EVENT_WORDS;
        slot_events(&self.words[self.layout.slot_events.range(words)], self.event_words())
    }

    /// The plan as text, a line a row: for people and snapshots.
    pub fn describe(&self) -> String {
        let mut text = format!(
            "step {} rows {} tokens {} outputs {}\n",
            self.step().0,
            self.count(Header::NumRows),
            self.count(Header::NumTokens),
            self.count(Header::NumOutputs)
        );
        for event in self.slot_events() {
            let what = if event.assigned { "assign" } else { "release" };
            let _ =
                writeln!(text, "  {what} slot {} r{}.{}", event.slot, event.request, event.index);
        }
        for copy in self.copies().chunks_exact(COPY_WORDS) {
            let _ = writeln!(text, "  copy block {} to {}", copy[0], copy[1]);
        }
        let indptr = self.query_indptr();
        for (row, slot) in self.row_slots().iter().enumerate() {
            let (first, end) = (indptr[row] as usize, indptr[row + 1] as usize);
            let _ = writeln!(
                text,
                "  row {row} slot {slot} positions {}..{} seq_len {} shared {} tokens {:?}",
                self.positions()[first],
                self.positions()[end - 1] + 1,
                self.seq_lens()[row],
                self.num_shared_blocks()[row],
                &self.token_ids()[first..end.min(first + 8)],
            );
        }
        text
    }
}
