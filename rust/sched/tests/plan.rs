//! What the writer writes, the view reads; the layout is what the module header says.

use fastserve_base::{CoreConfig, OutputKind, RequestId, SeqId, StepId, Ticket};
use fastserve_sched::plan::{HEADER_WORDS, SLOT_EVENT_WORDS, TIER_COPY_WORDS};
use fastserve_sched::{Assignment, Header, PlanLayout, PlanView, PlanWriter, StepBudget};

fn config() -> CoreConfig {
    CoreConfig {
        max_num_seqs: 4,
        max_num_batched_tokens: 20,
        max_num_output_rows: 6,
        max_model_len: 64,
        num_blocks: 16,
        ..CoreConfig::default()
    }
}

#[test]
fn sections_do_not_overlap_and_begin_on_lines() {
    let layout = PlanLayout::new(&config());
    let mut end = 0;
    for (name, section) in layout.sections() {
        assert!(section.offset >= end, "{name} overlaps the section before it");
        assert_eq!(section.offset % 16, 0, "{name} begins on a line of 64 bytes");
        end = section.offset + section.capacity;
    }
    assert!(end <= layout.words && layout.words < end + 16);
    assert_eq!(layout.header.capacity, HEADER_WORDS);
    assert_eq!(layout.query_indptr.capacity, 5);
    assert_eq!(layout.token_ids.capacity, 20);
    assert_eq!(layout.out_kinds.capacity, 6);
    assert_eq!(layout.slot_events.capacity, 4 * 4 * SLOT_EVENT_WORDS);
    // A whole sequence of matched blocks, beside what the step's own tokens may need.
    assert!(layout.table_edits.capacity / 3 >= 20 / 16 + 2 * 4 + 4);
    assert!(layout.event_words.capacity >= 64 + 4096);
}

#[test]
fn a_plan_reads_as_it_was_written() {
    let layout = PlanLayout::new(&config());
    let mut arena = vec![i32::MIN; layout.words];
    let mut writer = PlanWriter::new(&layout, &mut arena);
    let edits = writer.table_edits_left();
    let words = writer.event_words_left();
    writer.released(3);
    let seq = SeqId { request: RequestId(0x1_2345_6789), index: 2 };
    writer.assigned(&Assignment {
        slot: 1,
        seq,
        num_prompt_tokens: 2,
        adapter: 9,
        sampling: &[-5, 6],
        tokens: &[7, 8, 9],
    });
    writer.assigned(&Assignment {
        slot: 0,
        seq: SeqId::default(),
        num_prompt_tokens: 1,
        adapter: 0,
        sampling: &[],
        tokens: &[4],
    });
    assert_eq!(writer.event_words_left(), words - 6);
    writer.row(1, 3, 0);
    for (position, token) in [7, 8, 9].into_iter().enumerate() {
        writer.token(token, position as u32, 32 + position as i32);
    }
    writer.output(0, 1, OutputKind::Sample);
    writer.output(1, 1, OutputKind::Score);
    writer.row(0, 6, 1);
    writer.token(-1, 5, -1);
    writer.output(0, 0, OutputKind::Sample);
    writer.table_edit(1, 0, 2);
    writer.table_edit(0, 1, 5);
    assert_eq!(writer.table_edits_left(), edits - 2);
    writer.copy(5, 6);
    assert_eq!((writer.num_rows(), writer.num_tokens(), writer.num_outputs()), (2, 4, 3));
    writer.finish(StepId(0x7_0000_0001));

    let view = PlanView::new(&layout, &arena);
    assert_eq!(view.step(), StepId(0x7_0000_0001));
    assert_eq!(view.count(Header::NumRows), 2);
    assert_eq!(view.row_slots(), [1, 0]);
    assert_eq!(view.query_indptr(), [0, 3, 4]);
    assert_eq!(view.seq_lens(), [3, 6]);
    assert_eq!(view.num_shared_blocks(), [0, 1]);
    assert_eq!(view.token_ids(), [7, 8, 9, -1]);
    assert_eq!(view.positions(), [0, 1, 2, 5]);
    assert_eq!(view.slot_mapping(), [32, 33, 34, -1]);
    assert_eq!(view.out_rows(), [2, 1, 3]);
    assert_eq!(view.out_slots(), [1, 1, 0]);
    assert_eq!(view.out_kinds(), [0, 2, 0]);
    assert_eq!(view.table_edits(), [1, 0, 2, 0, 1, 5]);
    assert_eq!(view.copies(), [5, 6]);
    assert!(view.copies_in().is_empty() && view.copies_out().is_empty());
    let events: Vec<_> = view.slot_events().collect();
    assert!(!events[0].assigned && events[0].slot == 3);
    assert!(events[1].assigned);
    assert_eq!((events[1].request, events[1].index), (0x1_2345_6789, 2));
    assert_eq!((events[1].num_prompt_tokens, events[1].adapter), (2, 9));
    assert_eq!((events[1].sampling, events[1].tokens), (&[-5, 6][..], &[7, 8, 9][..]));
    assert_eq!((events[2].slot, events[2].tokens), (0, &[4][..]));
    assert_eq!(
        view.describe(),
        "step 30064771073 rows 2 tokens 4 outputs 3\n  \
         release slot 3 r0.0\n  \
         assign slot 1 r4886718345.2\n  \
         assign slot 0 r0.0\n  \
         copy block 5 to 6\n  \
         row 0 slot 1 positions 0..3 seq_len 3 shared 0 tokens [7, 8, 9]\n  \
         row 1 slot 0 positions 5..6 seq_len 6 shared 1 tokens [-1]\n"
    );
}

#[test]
fn copies_of_other_tiers_fit_or_are_refused() {
    let layout = PlanLayout::new(&config());
    let mut arena = vec![i32::MIN; layout.words];
    let mut writer = PlanWriter::new(&layout, &mut arena);
    let room = layout.copies_out.capacity / TIER_COPY_WORDS;
    assert!(room > 2);
    let ticket = |number| Ticket(0x5_0000_0000 + number as u64);
    for number in 0..room {
        assert!(writer.copy_out(number as i32, 70 + number as u32, ticket(number)));
    }
    assert!(!writer.copy_out(-1, 0, Ticket(0)), "the section is full");
    assert!(writer.copy_in(3, 4, Ticket(0x8000_0000_ffff_fffe)));
    assert_eq!(writer.num_tier_copies(), room as u32 + 1);
    writer.finish(StepId(1));
    let view = PlanView::new(&layout, &arena);
    let copies = view.copies_out().chunks(TIER_COPY_WORDS);
    assert_eq!(copies.len(), room);
    for (number, copy) in copies.enumerate() {
        assert_eq!(copy, [number as i32, 70 + number as i32, number as i32, 5]);
    }
    assert_eq!(view.copies_in(), [3, 4, -2, i32::MIN]);
}

#[test]
#[should_panic(expected = "plan version")]
fn another_version_is_refused() {
    let layout = PlanLayout::new(&config());
    let _ = PlanView::new(&layout, &vec![0; layout.words]);
}

#[test]
fn decode_rows_keep_their_tokens() {
    let mut budget = StepBudget::new(&config(), 6);
    assert_eq!(budget.tokens_left(), 14);
    assert_eq!(budget.chunk_room(false, 0), 14);
    budget.take_chunk(14, false, 0);
    assert_eq!(budget.chunk_room(false, 0), 0);
    budget.settle_decode(true);
    assert_eq!(budget.tokens_left(), 0);
    // A decode row that gives its token up leaves it to the others.
    budget.settle_decode(false);
    assert_eq!(budget.chunk_room(false, 0), 1);
}

#[test]
fn long_prompts_share_their_part_and_may_take_what_is_left() {
    let config = CoreConfig { max_long_prefill_percent: 25, max_chunk_tokens: Some(8), ..config() };
    let mut budget = StepBudget::new(&config, 0);
    assert_eq!((budget.chunk_room(true, 0), budget.chunk_room(false, 0)), (5, 8));
    budget.take_chunk(3, true, 0);
    assert_eq!(budget.chunk_room(true, 0), 2);
    budget.take_chunk(2, true, 0);
    assert_eq!((budget.chunk_room(true, 0), budget.tokens_left()), (0, 15));
    budget.take_chunk(1, true, 0);
    assert_eq!(budget.extension_room(5, 0), 3);
    assert_eq!(budget.extension_room(9, 0), 0);
    budget.take_chunk(12, false, 0);
    assert_eq!(budget.extension_room(0, 0), 2);
    let tiny = CoreConfig { max_long_prefill_percent: 1, ..config };
    assert_eq!(StepBudget::new(&tiny, 0).chunk_room(true, 0), 1, "long prompts always progress");
}

#[test]
fn prompts_take_less_beside_rows_that_decode() {
    let config = CoreConfig { max_num_mixed_prefill_tokens: Some(5), ..config() };
    assert_eq!(StepBudget::new(&config, 0).chunk_room(false, 0), 20);
    let mut budget = StepBudget::new(&config, 1);
    assert_eq!(budget.chunk_room(false, 900), 5);
    budget.take_chunk(3, false, 900);
    assert_eq!((budget.chunk_room(false, 0), budget.extension_room(3, 903)), (2, 2));
    budget.take_chunk(2, false, 0);
    assert_eq!((budget.chunk_room(false, 0), budget.tokens_left()), (0, 14));
    let more = CoreConfig { max_num_mixed_prefill_tokens: Some(1000), ..config };
    assert_eq!(StepBudget::new(&more, 1).chunk_room(false, 0), 19);
}

/// A step holds as many tokens of a prompt as weigh no more than its budget, counted one by one.
#[test]
fn chunks_shrink_as_their_context_grows() {
    for per_token in [1, 2, 7, 100, 4096, 1 << 24] {
        let config = CoreConfig { context_per_token: Some(per_token), ..config() };
        for start in [0, 1, 5, 99, 1000, 123_456, (1 << 30) - 21] {
            let budget = StepBudget::new(&config, 0);
            let (mut left, mut tokens) = (20 * u64::from(per_token), 0);
            while let Some(rest) = left.checked_sub(u64::from(per_token + start + tokens)) {
                (left, tokens) = (rest, tokens + 1);
            }
            let want = tokens.max(1);
            assert_eq!(budget.chunk_room(false, start), want, "{start} before it, {per_token}");
            // What is left after a part of it is room for the rest, and for no more.
            let mut budget = budget;
            let first = want / 2;
            if first > 0 {
                budget.take_chunk(first, false, start);
                assert_eq!(budget.extension_room(first, start + first), want - first);
            }
        }
    }
}

/// A token may weigh more than a step's whole budget. It is taken alone, and only if it is the first.
#[test]
fn a_prompt_never_stands_still() {
    let config = CoreConfig { context_per_token: Some(1), ..config() };
    let mut budget = StepBudget::new(&config, 3);
    assert_eq!(budget.chunk_room(false, 5_000), 1);
    budget.take_chunk(1, false, 5_000);
    assert_eq!((budget.chunk_room(false, 0), budget.extension_room(0, 0)), (0, 0));
    assert_eq!(budget.tokens_left(), 16, "rows with one token to go weigh nothing");
    let mut budget = StepBudget::new(&config, 0);
    budget.take_chunk(1, false, 0);
    assert_eq!((budget.chunk_room(false, 18), budget.chunk_room(false, 19)), (1, 0));
}

#[test]
fn outputs_beyond_one_a_row_are_counted() {
    let mut budget = StepBudget::new(&config(), 0);
    assert_eq!(budget.spare_outputs(), 2);
    budget.take_outputs(2);
    assert_eq!(budget.spare_outputs(), 0);
}
