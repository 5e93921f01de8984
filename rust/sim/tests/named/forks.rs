//! n > 1: forks share their prompt, and copy what they must.

use fastserve_base::{CoreConfig, Request, RequestId, SeqId};
use fastserve_sim::Event;

use crate::{Drive, request, sim, small, tokens};

/// n = 4 on a prompt that ends inside a block: all but the last to write copy that block, once.
#[test]
fn a_fork_copies_at_most_one_partial_block() {
    let mut sim = sim(small());
    let prompt = tokens(1, 6);
    sim.submit_all([Request { num_sequences: 4, ..request(0, prompt, 6) }]);
    sim.finish_all();
    assert_eq!((sim.counters.num_forks, sim.counters.num_copied_blocks), (3, 3));
    insta::assert_snapshot!(
        sim.events(|event| matches!(event, Event::Fork { .. } | Event::Copy { .. })),
        @r"
    step  free  held cached  event
       1    30     2      0  fork     r0.1 slot=1
       1    30     2      0  fork     r0.2 slot=2
       1    30     2      0  fork     r0.3 slot=3
       2    27     5      0  copy     b1 to b2
       2    27     5      0  copy     b1 to b3
       2    27     5      0  copy     b1 to b4
    "
    );
}

/// A prompt that fills its blocks leaves nothing to copy.
#[test]
fn forks_of_whole_blocks_copy_nothing() {
    let mut sim = sim(small());
    sim.submit_all([Request { num_sequences: 4, ..request(0, tokens(1, 8), 6) }]);
    sim.finish_all();
    assert_eq!((sim.counters.num_forks, sim.counters.num_copied_blocks), (3, 0));
    assert_eq!(sim.counters.num_prompt_tokens, 8);
}

/// Found by seed 56: a fork whose siblings have left owns its last block, and needs none to copy it
/// to. With the pool exhausted the first in the order waited for that block for ever.
#[test]
fn a_fork_that_is_left_alone_copies_nothing() {
    let mut sim = sim(CoreConfig { num_blocks: 2, max_model_len: 8, ..small() });
    sim.submit_all([Request { num_sequences: 3, ..request(0, tokens(1, 6), 2) }]);
    sim.finish_all();
    insta::assert_snapshot!(sim.trace.tail(usize::MAX), @r"
    step  free  held cached  event
       0     2     0      0  submit   r0 prompt=6 max_tokens=2 n=3
       1     0     2      0  admit    r0.0 slot=0 match=0 take=6
       1     0     2      0  fork     r0.1 slot=1
       1     0     2      0  fork     r0.2 slot=2
       1     0     2      0  commit   step 1
       2     0     2      0  preempt  r0.1 by slot 0
       2     0     2      0  preempt  r0.2 by slot 0
       2     0     2      0  extend   r0.0 at=6 take=1
       2     1     0      1  commit   step 2
       2     1     0      1  finish   r0.0 length outputs=2
       3     0     2      0  admit    r0.1 slot=0 match=4 take=3
       3     1     0      1  commit   step 3
       3     1     0      1  finish   r0.1 length outputs=2
       4     0     2      0  admit    r0.2 slot=0 match=4 take=3
       4     1     0      1  commit   step 4
       4     1     0      1  finish   r0.2 length outputs=2
    ");
}

/// The text side ends the first of three sequences before its prompt is whole: the next takes its
/// place, and the third forks from it.
#[test]
fn the_next_sequence_takes_the_place_of_one_that_ended_early() {
    let mut sim = sim(CoreConfig { max_chunk_tokens: Some(4), ..small() });
    sim.submit_all([Request { num_sequences: 3, ..request(0, tokens(1, 10), 2) }]);
    sim.step();
    let check = sim.cut(SeqId { request: RequestId(0), index: 0 }, 0);
    sim.must(check);
    sim.finish_all();
    insta::assert_snapshot!(sim.trace.tail(usize::MAX), @r"
    step  free  held cached  event
       0    32     0      0  submit   r0 prompt=10 max_tokens=2 n=3
       1    31     1      0  admit    r0.0 slot=0 match=0 take=4
       1    31     1      0  commit   step 1
       1    31     1      0  cut      r0.0 kept=0
       1    30     2      0  finish   r0.0 stop outputs=0
       2    30     2      0  admit    r0.1 slot=0 match=4 take=4
       2    30     2      0  commit   step 2
       3    29     3      0  extend   r0.1 at=8 take=2
       3    29     3      0  fork     r0.2 slot=1
       3    29     3      0  commit   step 3
       4    28     4      0  copy     b2 to b3
       4    28     4      0  extend   r0.1 at=10 take=1
       4    28     4      0  extend   r0.2 at=10 take=1
       4    30     0      2  commit   step 4
       4    30     0      2  finish   r0.1 length outputs=2
       4    30     0      2  finish   r0.2 length outputs=2
    ");
}

/// Found by seed 685: a slot that a victim left in the pass went to a fork in the same pass, and was
/// met again at the victim's old place. Here the second wants a block and preempts the last; it ends
/// its prompt and would fork into that slot; the fourth wants a block too.
#[test]
fn a_fork_does_not_take_the_slot_of_a_victim_of_its_step() {
    let config = CoreConfig {
        block_size: 2,
        num_blocks: 11,
        max_num_seqs: 5,
        max_chunk_tokens: Some(2),
        ..small()
    };
    let mut sim = sim(config);
    sim.submit_all([
        request(0, tokens(1, 4), 3),
        Request { num_sequences: 2, ..request(1, tokens(2, 5), 2) },
        request(2, tokens(3, 4), 3),
        request(3, tokens(4, 4), 3),
        request(4, tokens(5, 4), 3),
    ]);
    for _ in 0..4 {
        sim.step();
    }
    insta::assert_snapshot!(sim.events(|event| !matches!(event, Event::Submit { .. })), @r"
    step  free  held cached  event
       1     6     5      0  admit    r0.0 slot=0 match=0 take=2
       1     6     5      0  admit    r1.0 slot=1 match=0 take=2
       1     6     5      0  admit    r2.0 slot=2 match=0 take=2
       1     6     5      0  admit    r3.0 slot=3 match=0 take=2
       1     6     5      0  admit    r4.0 slot=4 match=0 take=2
       1     6     5      0  commit   step 1
       2     1    10      0  extend   r0.0 at=2 take=2
       2     1    10      0  extend   r1.0 at=2 take=2
       2     1    10      0  extend   r2.0 at=2 take=2
       2     1    10      0  extend   r3.0 at=2 take=2
       2     1    10      0  extend   r4.0 at=2 take=2
       2     1    10      0  commit   step 2
       3     0    10      1  preempt  r3.0 by slot 3
       3     0    10      1  preempt  r4.0 by slot 1
       3     0    10      1  extend   r0.0 at=4 take=1
       3     0    10      1  extend   r1.0 at=4 take=1
       3     0    10      1  admit    r1.1 slot=3 match=4 take=1
       3     0    10      1  extend   r2.0 at=4 take=1
       3     0    10      1  commit   step 3
       4     0    10      1  extend   r0.0 at=5 take=1
       4     0    10      1  extend   r1.0 at=5 take=1
       4     0    10      1  extend   r1.1 at=5 take=1
       4     0    10      1  extend   r2.0 at=5 take=1
       4     0     0     11  commit   step 4
       4     0     0     11  finish   r0.0 length outputs=3
       4     0     0     11  finish   r1.0 length outputs=2
       4     0     0     11  finish   r1.1 length outputs=2
       4     0     0     11  finish   r2.0 length outputs=3
    ");
    sim.finish_all();
}

/// Found by seed 1871: a block that a copy in flight reads from is not given to anybody else. The
/// first of three ends while the other two copy the block that they shared with it.
#[test]
fn the_source_of_a_copy_stays_until_its_step_has_committed() {
    let mut sim = sim(CoreConfig { num_blocks: 5, max_num_steps_in_flight: 2, ..small() });
    sim.submit_all([Request { num_sequences: 3, ..request(0, tokens(1, 5), 4) }]);
    assert!(sim.plan_one());
    let check = sim.cut(SeqId { request: RequestId(0), index: 1 }, 0);
    sim.must(check);
    assert!(sim.plan_one());
    sim.submit_all([request(1, tokens(2, 7), 1)]);
    sim.commit_one();
    assert!(sim.plan_one());
    insta::assert_snapshot!(sim.trace.tail(usize::MAX), @r"
    step  free  held cached  event
       0     5     0      0  submit   r0 prompt=5 max_tokens=4 n=3
       1     3     2      0  admit    r0.0 slot=0 match=0 take=5
       1     3     2      0  fork     r0.1 slot=1
       1     3     2      0  fork     r0.2 slot=2
       1     3     2      0  cut      r0.1 kept=0
       1     1     4      0  finish   r0.1 stop outputs=0
       2     1     4      0  copy     b1 to b2
       2     1     4      0  copy     b1 to b3
       2     1     4      0  extend   r0.0 at=5 take=1
       2     1     4      0  extend   r0.2 at=5 take=1
       2     1     4      0  submit   r1 prompt=7 max_tokens=1 n=1
       2     1     4      0  commit   step 1
       3     1     4      0  extend   r0.0 at=6 take=1
       3     1     4      0  extend   r0.2 at=6 take=1
    ");
    sim.finish_all();
}
