//! Hand-written scenarios: what the core promises, one promise a test, with the trace that shows it.
//!
//! Each runs under every checker. A trace is part of the promise: if it changes, somebody decided so.

use fastserve_base::{CoreConfig, PolicyKind, Request, RequestId, SeqId, Token};
use fastserve_engine::Lifecycle;
use fastserve_sim::{Event, PolicyChoice, Sim};

/// A pool of 32 blocks of 4 tokens; 8 rows, 64 tokens a step.
fn small() -> CoreConfig {
    CoreConfig {
        block_size: 4,
        num_blocks: 32,
        max_model_len: 64,
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_num_output_rows: 16,
        max_wait: None,
        vocab_size: 100_000,
        num_timeline_events: 1 << 12,
        ..CoreConfig::default()
    }
}

fn sim(config: CoreConfig) -> Sim {
    Sim::new(config, PolicyChoice::Config)
}

/// Tokens that no other `family` begins with.
fn tokens(family: u32, len: u32) -> Vec<Token> {
    (0..len).map(|at| family * 100 + at).collect()
}

fn request(id: u64, prompt: Vec<Token>, max_tokens: u32) -> Request {
    Request::new(RequestId(id), prompt, max_tokens)
}

/// What a test does to a simulation, with violations as panics that show the trace.
trait Drive {
    fn submit_all(&mut self, requests: impl IntoIterator<Item = Request>);
    fn plan_one(&mut self) -> bool;
    fn commit_one(&mut self);
    fn fail_one(&mut self);
    fn step(&mut self);
    fn finish_all(&mut self);
    fn must<T>(&self, check: fastserve_sim::Check<T>) -> T;
    fn events(&self, wanted: impl Fn(&Event) -> bool) -> String;
}

impl Drive for Sim {
    fn submit_all(&mut self, requests: impl IntoIterator<Item = Request>) {
        for request in requests {
            let answer = self.submit(request);
            assert_eq!(self.must(answer), None, "accepted");
        }
    }

    fn plan_one(&mut self) -> bool {
        self.now += 1;
        let check = self.plan();
        self.must(check)
    }

    fn commit_one(&mut self) {
        let check = self.commit(|_| false);
        self.must(check);
    }

    fn fail_one(&mut self) {
        let check = self.fail();
        self.must(check);
    }

    /// Plan and commit.
    fn step(&mut self) {
        assert!(self.plan_one(), "nothing to run");
        self.commit_one();
    }

    /// Step until everything has ended, and nothing is left behind.
    fn finish_all(&mut self) {
        let limit = self.config.max_num_steps_in_flight as usize;
        while !self.is_done() {
            if self.flights.len() == limit || !self.plan_one() {
                self.commit_one();
            }
        }
        self.must(self.check_end());
    }

    fn must<T>(&self, check: fastserve_sim::Check<T>) -> T {
        check.unwrap_or_else(|violation| panic!("{violation}\n{}", self.trace.tail(40)))
    }

    fn events(&self, wanted: impl Fn(&Event) -> bool) -> String {
        self.trace.only(wanted)
    }
}

fn is_end(event: &Event) -> bool {
    matches!(event, Event::Finish { .. })
}

fn is_row(event: &Event) -> bool {
    matches!(event, Event::Admit { .. } | Event::Extend { .. } | Event::Rematch { .. })
}

/// 64 cold requests with one long prefix: it is computed once, and everybody else waits for it.
#[test]
fn cold_arrivals_with_one_prefix_compute_it_once() {
    let config = CoreConfig {
        num_blocks: 512,
        max_num_seqs: 64,
        max_num_batched_tokens: 128,
        max_num_output_rows: 64,
        ..small()
    };
    let mut sim = sim(config);
    sim.submit_all((0..64).map(|id| {
        let prompt = [tokens(1, 48), tokens(2 + id, 3)].concat();
        request(u64::from(id), prompt, 2)
    }));
    sim.finish_all();
    assert_eq!(sim.counters.num_prompt_tokens, 48 + 64 * 3, "prompt tokens computed");
    assert_eq!(sim.counters.prefix_cache_hits, 63 * 48, "prompt tokens found");
}

/// A row may use blocks that another row of the same step fills: in every layer all rows write
/// before any row attends.
#[test]
fn a_row_shares_what_another_row_of_its_step_writes() {
    let mut sim = sim(small());
    sim.submit_all([
        request(0, tokens(1, 9), 2),
        request(1, [tokens(1, 8), tokens(2, 3)].concat(), 2),
    ]);
    sim.finish_all();
    insta::assert_snapshot!(sim.events(is_row), @r"
    step  free  held cached  event
       1    28     4      0  admit    r0.0 slot=0 match=0 take=9
       1    28     4      0  admit    r1.0 slot=1 match=8 take=3
       2    28     4      0  extend   r0.0 at=9 take=1
       2    28     4      0  extend   r1.0 at=11 take=1
    ");
}

/// A prompt that is computed in chunks is followed chunk by chunk.
#[test]
fn a_follower_waits_for_the_chunks_of_its_leader() {
    let mut sim = sim(CoreConfig { max_chunk_tokens: Some(6), ..small() });
    sim.submit_all((0..2).map(|id| request(id, tokens(1, 18), 1)));
    sim.finish_all();
    insta::assert_snapshot!(sim.events(is_row), @r"
    step  free  held cached  event
       1    30     2      0  admit    r0.0 slot=0 match=0 take=6
       2    29     3      0  extend   r0.0 at=6 take=6
       3    26     6      0  extend   r0.0 at=12 take=6
       3    26     6      0  admit    r1.0 slot=1 match=16 take=2
    ");
}

/// Whoever waited for an aborted leader computes the rest itself, from where the leader stopped.
#[test]
fn a_follower_takes_over_when_its_leader_is_aborted() {
    let mut sim = sim(CoreConfig { max_chunk_tokens: Some(4), ..small() });
    sim.submit_all((0..2).map(|id| request(id, tokens(1, 17), 1)));
    sim.step();
    sim.step();
    let check = sim.abort(0);
    sim.must(check);
    sim.finish_all();
    insta::assert_snapshot!(sim.events(|event| is_row(event) || is_end(event)), @r"
    step  free  held cached  event
       1    31     1      0  admit    r0.0 slot=0 match=0 take=4
       2    30     2      0  extend   r0.0 at=4 take=4
       2    29     3      0  finish   r0.0 abort outputs=0
       3    29     3      0  admit    r1.0 slot=0 match=8 take=4
       4    28     4      0  extend   r1.0 at=12 take=4
       5    27     5      0  extend   r1.0 at=16 take=1
       5    28     0      4  finish   r1.0 length outputs=1
    ");
}

/// A step that fails takes with it what others matched of its blocks, in that step or on top of it.
#[test]
fn a_failed_step_rolls_back_its_followers() {
    let mut sim = sim(CoreConfig { max_num_steps_in_flight: 2, ..small() });
    sim.submit_all([request(0, tokens(1, 13), 3)]);
    assert!(sim.plan_one());
    sim.submit_all([request(1, [tokens(1, 12), tokens(2, 2)].concat(), 3)]);
    assert!(sim.plan_one(), "the second matches blocks of a step that has not run");
    sim.fail_one();
    sim.finish_all();
    insta::assert_snapshot!(
        sim.events(|event| is_row(event) || matches!(event, Event::Fail { .. })),
        @r"
    step  free  held cached  event
       1    28     4      0  admit    r0.0 slot=0 match=0 take=13
       2    27     5      0  extend   r0.0 at=13 take=1
       2    27     5      0  admit    r1.0 slot=1 match=12 take=2
       2    32     0      0  fail     step 1 and 1 more
       3    27     5      0  admit    r0.0 slot=1 match=0 take=13
       3    27     5      0  admit    r1.0 slot=0 match=12 take=2
       4    27     5      0  extend   r0.0 at=13 take=1
       4    27     5      0  extend   r1.0 at=14 take=1
       5    27     5      0  extend   r0.0 at=14 take=1
       5    27     5      0  extend   r1.0 at=15 take=1
    "
    );
    assert_eq!(sim.counters.num_rollbacks, 2);
    assert_eq!(sim.counters.num_recomputed_tokens, 13 + 1 + 2);
}

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

/// A reset under running sequences: they go on with what they hold, and nobody else gets it.
#[test]
fn a_reset_keeps_the_running_and_shares_nothing_old() {
    let mut sim = sim(small());
    let prompt = tokens(1, 9);
    sim.submit_all([request(0, prompt.clone(), 8)]);
    sim.step();
    let check = sim.reset();
    sim.must(check);
    sim.submit_all([request(1, prompt.clone(), 1)]);
    sim.step();
    sim.submit_all([request(2, prompt, 1)]);
    sim.finish_all();
    insta::assert_snapshot!(sim.events(is_row), @r"
    step  free  held cached  event
       1    29     3      0  admit    r0.0 slot=0 match=0 take=9
       2    26     6      0  extend   r0.0 at=9 take=1
       2    26     6      0  admit    r1.0 slot=1 match=0 take=9
       3    26     6      0  extend   r0.0 at=10 take=1
       3    26     6      0  admit    r2.0 slot=1 match=8 take=1
       4    27     3      2  extend   r0.0 at=11 take=1
       5    26     4      2  extend   r0.0 at=12 take=1
       6    26     4      2  extend   r0.0 at=13 take=1
       7    26     4      2  extend   r0.0 at=14 take=1
       8    26     4      2  extend   r0.0 at=15 take=1
    ");
}

/// With two steps in flight an aborted sequence ends at once, its blocks come back with the last step
/// that names them.
#[test]
fn blocks_come_back_when_the_last_step_that_names_them_has_committed() {
    let mut sim = sim(CoreConfig { max_num_steps_in_flight: 2, ..small() });
    sim.submit_all([request(0, tokens(1, 9), 9), request(1, tokens(2, 5), 9)]);
    assert!(sim.plan_one() && sim.plan_one());
    let check = sim.abort(0);
    sim.must(check);
    sim.commit_one();
    assert!(sim.plan_one());
    sim.commit_one();
    sim.commit_one();
    insta::assert_snapshot!(sim.trace.tail(usize::MAX), @r"
    step  free  held cached  event
       0    32     0      0  submit   r0 prompt=9 max_tokens=9 n=1
       0    32     0      0  submit   r1 prompt=5 max_tokens=9 n=1
       1    27     5      0  admit    r0.0 slot=0 match=0 take=9
       1    27     5      0  admit    r1.0 slot=1 match=0 take=5
       2    27     5      0  extend   r0.0 at=9 take=1
       2    27     5      0  extend   r1.0 at=5 take=1
       2    27     5      0  abort    r0
       2    27     5      0  commit   step 1
       2    27     5      0  finish   r0.0 abort outputs=1
       3    27     5      0  extend   r1.0 at=6 take=1
       3    28     2      2  commit   step 2
       3    28     2      2  commit   step 3
    ");
    sim.finish_all();
}

/// Closing with steps in flight ends every sequence; the blocks follow with the steps.
#[test]
fn closing_ends_everything_and_the_steps_in_flight_may_follow() {
    let mut sim = sim(CoreConfig { max_num_steps_in_flight: 2, ..small() });
    sim.submit_all((0..3).map(|id| request(id, tokens(id as u32 + 1, 5), 9)));
    assert!(sim.plan_one() && sim.plan_one());
    let check = sim.lifecycle(Lifecycle::Closed);
    sim.must(check);
    assert!(sim.ledger.live.is_empty());
    sim.commit_one();
    sim.commit_one();
    sim.must(sim.check_end());
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

/// A prefix goes to another tier, is evicted, and comes back for a request that waits for it.
#[test]
fn a_prefix_is_copied_out_and_back() {
    let mut sim = sim(CoreConfig { num_blocks: 8, ..small() });
    let (prompt, namespace) = (tokens(1, 9), fastserve_base::Namespace(0));
    sim.submit_all([request(0, prompt.clone(), 1)]);
    sim.finish_all();
    let check = sim.offload((namespace, &prompt[..8]), 0, 2);
    sim.must(check);
    assert!(sim.plan_one());
    sim.commit_one();
    let check = sim.complete(0, true);
    sim.must(check);

    sim.submit_all([request(1, tokens(2, 28), 1)]); // Evicts the second block.
    sim.finish_all();
    let places = sim.tier.places_of(namespace, &prompt[..8], 4).expect("stored");
    let check = sim.fetch((namespace, &prompt[..8]), &places);
    sim.must(check);
    sim.submit_all([request(2, prompt, 1)]);
    assert!(sim.plan_one(), "lists the copy; the request waits for it");
    sim.commit_one();
    assert!(!sim.plan_one());
    let check = sim.complete(0, true);
    sim.must(check);
    sim.finish_all();
    insta::assert_snapshot!(sim.trace.tail(usize::MAX), @r"
    step  free  held cached  event
       0     8     0      0  submit   r0 prompt=9 max_tokens=1 n=1
       1     5     3      0  admit    r0.0 slot=0 match=0 take=9
       1     6     0      2  commit   step 1
       1     6     0      2  finish   r0.0 length outputs=1
       1     6     2      0  offload  t1 blocks=2
       2     6     2      0  commit   step 2
       2     6     0      2  complete t1 ok
       2     6     0      2  submit   r1 prompt=28 max_tokens=1 n=1
       3     0     7      1  admit    r1.0 slot=0 match=0 take=28
       3     0     0      8  commit   step 3
       3     0     0      8  finish   r1.0 length outputs=1
       3     0     2      6  fetch    t2 blocks=1
       3     0     2      6  submit   r2 prompt=9 max_tokens=1 n=1
       4     0     2      6  commit   step 4
       4     0     0      8  complete t2 ok
       5     0     3      5  admit    r2.0 slot=0 match=8 take=1
       5     1     0      7  commit   step 5
       5     1     0      7  finish   r2.0 length outputs=1
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
