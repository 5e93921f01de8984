//! Prefixes: who computes a block, who uses it, and for how long.

use fastserve_base::{CoreConfig, Namespace};
use fastserve_sim::Event;

use crate::{Drive, is_end, is_row, request, sim, small, tokens};

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

/// A prefix goes to another tier, is evicted, and comes back for a request that waits for it.
#[test]
fn a_prefix_is_copied_out_and_back() {
    let mut sim = sim(CoreConfig { num_blocks: 8, ..small() });
    let (prompt, namespace) = (tokens(1, 9), Namespace(0));
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
