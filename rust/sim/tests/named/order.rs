//! Who is served first, who is preempted, and what a step may hold.

use fastserve_base::{CoreConfig, PolicyKind, Request};
use fastserve_sim::Event;

use crate::{Drive, is_end, is_row, request, sim, small, tokens};

/// A pool too small for both sequences preempts the later one, which comes back when the first has
/// ended, and finishes exactly. What survives of its blocks is not computed again.
#[test]
fn a_preempted_sequence_does_not_pin_itself_out() {
    let config = CoreConfig { block_size: 2, num_blocks: 5, max_num_seqs: 2, ..small() };
    let mut sim = sim(config);
    sim.submit_all([request(0, tokens(1, 4), 4), request(1, tokens(2, 3), 4)]);
    sim.finish_all();
    insta::assert_snapshot!(sim.trace.tail(usize::MAX), @r"
    step  free  held cached  event
       0     5     0      0  submit   r0 prompt=4 max_tokens=4 n=1
       0     5     0      0  submit   r1 prompt=3 max_tokens=4 n=1
       1     1     4      0  admit    r0.0 slot=0 match=0 take=4
       1     1     4      0  admit    r1.0 slot=1 match=0 take=3
       1     1     4      0  commit   step 1
       2     0     5      0  extend   r0.0 at=4 take=1
       2     0     5      0  extend   r1.0 at=3 take=1
       2     0     5      0  commit   step 2
       3     0     3      2  preempt  r1.0 by slot 1
       3     0     3      2  extend   r0.0 at=5 take=1
       3     0     3      2  commit   step 3
       4     0     4      1  extend   r0.0 at=6 take=1
       4     1     0      4  commit   step 4
       4     1     0      4  finish   r0.0 length outputs=4
       5     0     3      2  admit    r1.0 slot=0 match=2 take=3
       5     0     3      2  commit   step 5
       6     0     3      2  extend   r1.0 at=5 take=1
       6     0     0      5  commit   step 6
       6     0     0      5  finish   r1.0 length outputs=4
    ");
}

/// Found by seed 220: a preempted sequence came back as soon as its tokens fit, only to be preempted
/// again for the next block.
#[test]
fn a_preempted_sequence_comes_back_when_another_has_ended() {
    let config = CoreConfig { block_size: 2, num_blocks: 8, max_num_seqs: 3, ..small() };
    let mut sim = sim(config);
    sim.submit_all((0..3).map(|id| request(id, tokens(id as u32 + 1, 3), 9)));
    sim.finish_all();
    insta::assert_snapshot!(
        sim.events(|event| is_end(event) || matches!(event, Event::Admit { .. } | Event::Preempt { .. })),
        @r"
    step  free  held cached  event
       1     2     6      0  admit    r0.0 slot=0 match=0 take=3
       1     2     6      0  admit    r1.0 slot=1 match=0 take=3
       1     2     6      0  admit    r2.0 slot=2 match=0 take=3
       3     0     6      2  preempt  r2.0 by slot 2
       7     0     5      3  preempt  r1.0 by slot 0
       9     1     0      7  finish   r0.0 length outputs=9
      10     0     8      0  admit    r1.0 slot=0 match=4 take=5
      10     0     8      0  admit    r2.0 slot=1 match=0 take=5
      12     0     6      2  preempt  r2.0 by slot 0
      12     1     0      7  finish   r1.0 length outputs=9
      13     0     4      4  admit    r2.0 slot=0 match=4 take=3
      17     1     0      7  finish   r2.0 length outputs=9
    "
    );
}

/// A prompt of many chunks beside sequences that decode: they have their token in every step.
#[test]
fn a_long_prompt_does_not_displace_decode() {
    let mut sim = sim(CoreConfig { max_num_batched_tokens: 8, max_num_seqs: 4, ..small() });
    sim.submit_all((0..2).map(|id| request(id, tokens(id as u32 + 1, 3), 8)));
    sim.step();
    sim.submit_all([request(2, tokens(3, 30), 1)]);
    sim.finish_all();
    insta::assert_snapshot!(sim.events(is_row), @r"
    step  free  held cached  event
       1    30     2      0  admit    r0.0 slot=0 match=0 take=3
       1    30     2      0  admit    r1.0 slot=1 match=0 take=3
       2    28     4      0  extend   r0.0 at=3 take=1
       2    28     4      0  extend   r1.0 at=3 take=1
       2    28     4      0  admit    r2.0 slot=2 match=0 take=6
       3    25     7      0  extend   r0.0 at=4 take=1
       3    25     7      0  extend   r1.0 at=4 take=1
       3    25     7      0  extend   r2.0 at=6 take=6
       4    23     9      0  extend   r0.0 at=5 take=1
       4    23     9      0  extend   r1.0 at=5 take=1
       4    23     9      0  extend   r2.0 at=12 take=6
       5    22    10      0  extend   r0.0 at=6 take=1
       5    22    10      0  extend   r1.0 at=6 take=1
       5    22    10      0  extend   r2.0 at=18 take=6
       6    20    12      0  extend   r0.0 at=7 take=1
       6    20    12      0  extend   r1.0 at=7 take=1
       6    20    12      0  extend   r2.0 at=24 take=6
       7    19     6      7  extend   r0.0 at=8 take=1
       7    19     6      7  extend   r1.0 at=8 take=1
       8    19     6      7  extend   r0.0 at=9 take=1
       8    19     6      7  extend   r1.0 at=9 take=1
    ");
}

/// Long prompts leave room for short ones that come later, and take what those do not want.
#[test]
fn long_prompts_have_a_share_of_the_step() {
    let config = CoreConfig {
        max_num_batched_tokens: 16,
        long_prefill_threshold: Some(16),
        max_long_prefill_percent: 50,
        ..small()
    };
    let mut sim = sim(config);
    sim.submit_all([request(0, tokens(1, 40), 1), request(1, tokens(2, 40), 1)]);
    sim.submit_all([request(2, tokens(3, 6), 1)]);
    sim.finish_all();
    insta::assert_snapshot!(sim.events(is_row), @r"
    step  free  held cached  event
       1    27     5      0  admit    r0.0 slot=0 match=0 take=10
       1    27     5      0  admit    r2.0 slot=1 match=0 take=6
       2    24     7      1  extend   r0.0 at=10 take=16
       3    20    11      1  extend   r0.0 at=26 take=14
       3    20    11      1  admit    r1.0 slot=1 match=0 take=2
       4    16     5     11  extend   r1.0 at=2 take=16
       5    12     9     11  extend   r1.0 at=18 take=16
       6    11    10     11  extend   r1.0 at=34 take=6
    ");
}

/// Under `priority`, a request that has waited for `max_wait` goes ahead of better ones that came
/// later.
#[test]
fn an_aged_request_goes_ahead_of_later_ones() {
    let config = CoreConfig {
        scheduling_policy: PolicyKind::Priority,
        max_num_seqs: 1,
        max_wait: Some(12),
        ..small()
    };
    let mut sim = sim(config);
    sim.submit_all([Request { priority: 5, ..request(0, tokens(1, 3), 2) }]);
    for id in 1..12 {
        sim.submit_all([Request { priority: -1, ..request(id, tokens(id as u32 + 1, 3), 2) }]);
        sim.step();
    }
    sim.finish_all();
    insta::assert_snapshot!(sim.events(|event| matches!(event, Event::Admit { .. })), @r"
    step  free  held cached  event
       1    31     1      0  admit    r1.0 slot=0 match=0 take=3
       3    30     1      1  admit    r2.0 slot=0 match=0 take=3
       5    29     1      2  admit    r3.0 slot=0 match=0 take=3
       7    28     1      3  admit    r4.0 slot=0 match=0 take=3
       9    27     1      4  admit    r5.0 slot=0 match=0 take=3
      11    26     1      5  admit    r6.0 slot=0 match=0 take=3
      13    25     1      6  admit    r0.0 slot=0 match=0 take=3
      15    24     1      7  admit    r7.0 slot=0 match=0 take=3
      17    23     1      8  admit    r8.0 slot=0 match=0 take=3
      19    22     1      9  admit    r9.0 slot=0 match=0 take=3
      21    21     1     10  admit    r10.0 slot=0 match=0 take=3
      23    20     1     11  admit    r11.0 slot=0 match=0 take=3
    ");
}

/// Scores want an output row for every prompt position: chunks are cut to the rows there are.
#[test]
fn scored_prompts_share_the_output_rows() {
    let mut sim = sim(CoreConfig { max_num_seqs: 3, max_num_output_rows: 8, ..small() });
    sim.submit_all(
        (0..2).map(|id| Request { score_prompt: true, ..request(id, tokens(1, 14), 2) }),
    );
    sim.finish_all();
    insta::assert_snapshot!(sim.events(is_row), @r"
    step  free  held cached  event
       1    29     3      0  admit    r0.0 slot=0 match=0 take=6
       1    29     3      0  admit    r1.0 slot=1 match=0 take=1
       2    28     4      0  extend   r0.0 at=6 take=6
       2    28     4      0  extend   r1.0 at=1 take=1
       3    26     6      0  extend   r0.0 at=12 take=2
       3    26     6      0  extend   r1.0 at=2 take=5
       4    24     8      0  extend   r0.0 at=14 take=1
       4    24     8      0  extend   r1.0 at=7 take=6
       5    25     4      3  extend   r1.0 at=13 take=1
       6    25     4      3  extend   r1.0 at=14 take=1
    ");
}
