//! Who computes what others need, and who waits for it.

mod driver;

use driver::{Driver, request, small};
use fastserve_base::{CoreConfig, PolicyKind, Request, RequestId};
use fastserve_engine::EventKind;

#[test]
fn a_block_is_shared_when_it_is_filled_and_its_tokens_are_known() {
    for max_num_steps_in_flight in [1, 2] {
        let mut driver = Driver::new(CoreConfig { max_num_steps_in_flight, ..small() });
        driver.submit(request(1, &[1, 2, 3], 2));
        driver.plan();
        if max_num_steps_in_flight == 2 {
            // The second step fills a block with a token that the first is still to sample.
            driver.plan();
            assert_eq!(driver.core.stats().num_steps_in_flight, 2);
            driver.commit();
        } else {
            driver.commit();
            driver.plan();
        }
        assert_eq!(driver.core.snapshot().len(), 2, "{max_num_steps_in_flight} in flight");
        driver.commit();
        assert_eq!(driver.core.stats().cached, 2);
    }
}

#[test]
fn a_row_stands_beside_the_one_that_still_shares_most() {
    let mut driver = Driver::new(CoreConfig { max_num_seqs: 6, num_blocks: 64, ..small() });
    let prompt = |shared: usize, own: u32| {
        let mut tokens = vec![10; shared];
        tokens.push(own);
        tokens
    };
    driver.submit(request(1, &prompt(8, 1), 3));
    driver.step();
    driver.submit(request(2, &prompt(4, 2), 12));
    driver.step();
    driver.submit(request(3, &[20; 5], 12));
    driver.step();
    assert_eq!(driver.ended(1).reason, 2);
    // The first has ended, which computed the four blocks; the second shares two of them.
    driver.submit(request(4, &prompt(8, 4), 12));
    driver.plan();
    let (second, third, fourth) = (1, 2, 0);
    assert_eq!(driver.view().row_slots(), [second, fourth, third]);
    assert_eq!(driver.view().num_shared_blocks(), [0, 2, 0]);
    driver.commit();
    // Now the fourth is the one to stand beside, wherever it got the blocks from.
    driver.submit(request(5, &prompt(4, 5), 12));
    driver.step();
    driver.submit(request(6, &prompt(8, 6), 12));
    driver.plan();
    let (fifth, sixth) = (3, 4);
    assert_eq!(driver.view().row_slots(), [second, fifth, fourth, sixth, third]);
    assert_eq!(driver.view().num_shared_blocks(), [0, 2, 2, 4, 0]);
    driver.commit();
    driver.run_to_end(20);
}

/// The longest prompt here; others begin like it.
fn prompt(len: u32) -> Vec<u32> {
    (0..len).collect()
}

/// Four tokens a step for all long prompts together, of which [`BEHIND`] gets none from the second
/// step on.
fn contended() -> CoreConfig {
    CoreConfig {
        scheduling_policy: PolicyKind::Priority,
        num_blocks: 64,
        max_num_seqs: 6,
        max_num_batched_tokens: 16,
        max_num_output_rows: 9,
        max_chunk_tokens: Some(4),
        long_prefill_threshold: Some(16),
        max_long_prefill_percent: 25,
        ..small()
    }
}

const AHEAD: u64 = 1;
const SHORT: u64 = 2;
const BEHIND: u64 = 3;

/// A core after a step in which [`BEHIND`] computed the first two blocks of its long prompt. From now on
/// [`AHEAD`] takes all that long prompts may have: in this step it had one token, since a request with
/// many outputs took the output rows that its scores need.
fn held_up(mut driver: Driver) -> Driver {
    let config = driver.core.config();
    let num_sequences = 1 + config.max_num_output_rows - config.max_num_seqs;
    driver.submit(Request { num_sequences, ..request(0, &[90], 1) });
    let ahead = Request { score_prompt: true, priority: 1, ..request(AHEAD, &[80; 30], 1) };
    driver.submit(ahead);
    driver.submit(Request { priority: 3, ..request(BEHIND, &prompt(30), 1) });
    assert_eq!(driver.plan().num_tokens, 1 + 1 + 4);
    driver
}

/// A short prompt that begins like the long one overtakes it.
fn overtake(driver: &Driver) -> Request {
    let short = Request { priority: 2, ..request(SHORT, &prompt(20), 1) };
    driver.submit(short.clone());
    short
}

#[test]
fn a_row_that_was_overtaken_matches_and_waits_and_computes_nothing_twice() {
    let mut driver = held_up(Driver::new(contended()));
    driver.commit();
    let short = overtake(&driver);
    assert_eq!(driver.plan().num_tokens, 4 + 4, "one ahead, one that overtakes");
    driver.commit();
    // From now on the share of long prompts is free, and it is the blocks that are waited for.
    driver.inbox.abort(RequestId(AHEAD));
    assert_eq!(driver.plan().num_rows, 1);
    driver.commit();
    let stats = driver.core.stats();
    assert_eq!(stats.prefix_cache_hits, 4 + 8, "what each found of the other's");
    assert_eq!(stats.num_leader_waits, 1);
    let kinds = |id| driver.inbox.timeline(RequestId(id)).into_iter().map(|event| event.kind);
    let waits = kinds(BEHIND).any(|kind| {
        let EventKind::LeaderWait { leader } = kind else { return false };
        kinds(SHORT).any(|kind| kind == EventKind::Admitted { cached: 4, slot: leader })
    });
    assert!(waits, "for the row of the short one");
    driver.run_to_end(20);
    driver.assert_exact(&short);
    driver.assert_exact(&request(BEHIND, &prompt(30), 1));
    let stats = driver.core.stats();
    assert_eq!(stats.num_prompt_tokens, 1 + 5 + 30, "what both begin with only once");
}

#[test]
fn blocks_of_a_row_that_waits_are_left_for_it() {
    // Beside the 6 blocks that both hold, the short one needs 4 and the long one 9: 19 are left.
    for (len, num_rows) in [(38, 2), (39, 1)] {
        let mut driver = held_up(Driver::new(CoreConfig { num_blocks: 38, ..contended() }));
        driver.commit();
        overtake(&driver);
        driver.step();
        driver.inbox.abort(RequestId(AHEAD));
        driver.submit(Request { priority: 4, ..request(4, &vec![70; len], 1) });
        assert_eq!(driver.plan().num_rows, num_rows, "{len} tokens");
        driver.commit();
        driver.run_to_end(30);
    }
}

#[test]
fn a_failed_step_takes_its_rows_along_and_those_that_matched_its_blocks() {
    for (follows, num_rollbacks) in [(false, 2), (true, 3)] {
        let mut driver =
            held_up(Driver::new(CoreConfig { max_num_steps_in_flight: 2, ..contended() }));
        driver.commit();
        let short = overtake(&driver);
        driver.plan();
        if follows {
            assert_eq!(driver.plan().num_rows, 2, "the long one matches and has no token");
            assert_eq!(driver.core.stats().prefix_cache_hits, 4 + 8);
        }
        driver.fail();
        let stats = driver.core.stats();
        assert_eq!(stats.num_rollbacks, num_rollbacks, "{follows}");
        assert_eq!(stats.num_running, 3 - num_rollbacks);
        driver.run_to_end(30);
        driver.assert_exact(&short);
        driver.assert_exact(&request(BEHIND, &prompt(30), 1));
    }
}

/// A plan has room for 4,096 matched blocks and one longest sequence's more, of which forks leave little.
#[test]
fn a_row_matches_later_what_the_plan_cannot_tell_the_device() {
    let forked: Vec<u32> = (0..200).map(|token| (token * 7 + 5) % driver::VOCAB).collect();
    for (blocks_of_longest, num_hits, num_begun) in [(109, 8, 1), (108, 8, 0), (107, 0, 1)] {
        let config = CoreConfig {
            num_blocks: 512,
            max_model_len: 2 * blocks_of_longest,
            max_num_seqs: 64,
            max_num_batched_tokens: 64,
            max_num_output_rows: 64 + 48,
            max_long_prefill_percent: 7,
            ..contended()
        };
        let mut driver = Driver::new(config);
        driver.submit(request(9, &forked[..193], 1));
        driver.run_to_end(60);
        let mut driver = held_up(driver);
        driver.commit();
        let short = overtake(&driver);
        // 96 blocks of its prompt are matched, 4 tokens are computed now and 4 in the next step: then it
        // forks 42 times, with 100 blocks each.
        let forks = Request { num_sequences: 43, priority: 2, ..request(10, &forked, 2) };
        driver.submit(forks.clone());
        driver.step();
        driver.submit(Request { priority: 9, ..request(11, &[70], 1) });
        let before = driver.core.stats().prefix_cache_hits;
        assert_eq!(before, 4 + 192);
        // Four scores, the forks and their parent, and a new row if one more block can be told.
        assert_eq!(driver.plan().num_outputs, 4 + 43 + num_begun);
        assert_eq!(driver.core.stats().prefix_cache_hits - before, num_hits);
        driver.commit();
        driver.run_to_end(60);
        driver.assert_exact(&forks);
        driver.assert_exact(&short);
        driver.assert_exact(&request(BEHIND, &prompt(30), 1));
    }
}
