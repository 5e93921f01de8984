//! Who gives up blocks and for whom, and who waits instead.

mod driver;

use driver::{Driver, request, small};
use fastserve_base::{CoreConfig, PolicyKind, Request, RequestId};
use fastserve_engine::EventKind;

#[test]
fn nobody_is_preempted_for_blocks_that_come_back_at_a_commit() {
    let config = CoreConfig { num_blocks: 6, max_num_steps_in_flight: 2, ..small() };
    let mut driver = Driver::new(config);
    let wanted = [request(1, &[1; 4], 3), request(2, &[2; 4], 3), request(3, &[3; 4], 3)];
    for request in &wanted {
        driver.submit(request.clone());
    }
    assert_eq!(driver.plan().num_rows, 3);
    driver.inbox.abort(RequestId(2));
    assert_eq!(driver.plan().num_rows, 0, "both others need a block, two are on their way");
    assert_eq!(driver.core.stats().free, 0);
    driver.commit();
    assert_eq!(driver.plan().num_rows, 2);
    driver.commit();
    driver.run_to_end(5);
    driver.assert_exact(&wanted[0]);
    driver.assert_exact(&wanted[2]);
    assert_eq!(driver.core.stats().num_preemptions, 0);
}

#[test]
fn a_preempted_sequence_comes_back_when_another_has_ended() {
    let mut driver = Driver::new(CoreConfig { num_blocks: 10, ..small() });
    let wanted = [request(1, &[1; 4], 8), request(2, &[2; 4], 4), request(3, &[3; 4], 4)];
    for request in &wanted {
        driver.submit(request.clone());
    }
    driver.run_to_end(30);
    for request in &wanted {
        driver.assert_exact(request);
    }
    let queries = driver.core.stats().prefix_cache_queries;
    assert_eq!(queries, 3 * 4, "tokens are looked up for a hit once");
    let at = |id, of: fn(EventKind) -> bool| -> Vec<u64> {
        let events = driver.inbox.timeline(RequestId(id));
        events.iter().filter(|event| of(event.kind)).map(|event| event.at).collect()
    };
    let admitted = at(3, |kind| matches!(kind, EventKind::Admitted { .. }));
    let [ended, last] =
        [2, 1].map(|id| at(id, |kind| matches!(kind, EventKind::Finished { .. }))[0]);
    assert_eq!(admitted.len(), 2, "it was preempted once");
    assert!(ended < admitted[1] && admitted[1] < last, "{ended} {admitted:?} {last}");
}

#[test]
fn nobody_is_preempted_for_a_row_that_gets_no_token() {
    // Beside rows with one token to go, the first prompt takes all that prompts may.
    let config = CoreConfig {
        num_blocks: 11,
        max_chunk_tokens: Some(4),
        max_num_mixed_prefill_tokens: Some(4),
        ..small()
    };
    let mut driver = Driver::new(config);
    let wanted = [request(1, &[1; 12], 1), request(2, &[2; 6], 1), request(3, &[3; 4], 3)];
    for request in &wanted {
        driver.submit(request.clone());
    }
    for num_tokens in [4 + 4 + 4, 4 + 1, 4 + 1] {
        assert_eq!(driver.plan().num_tokens, num_tokens);
        driver.commit();
    }
    assert_eq!(driver.core.stats().num_preemptions, 0);
    driver.run_to_end(10);
    for request in &wanted {
        driver.assert_exact(request);
    }
}

#[test]
fn a_long_prompt_with_forks_copies_when_it_goes_on_and_not_before() {
    let mut driver = Driver::new(CoreConfig { long_prefill_threshold: Some(2), ..small() });
    let wanted = Request { num_sequences: 2, ..request(1, &[1, 2, 3, 4, 5], 3) };
    driver.submit(wanted.clone());
    for num_copies in [0, 1, 0] {
        assert_eq!(driver.plan().num_copies, num_copies);
        driver.commit();
    }
    driver.assert_exact(&wanted);
}

#[test]
fn a_fork_gives_way_where_there_is_no_block_to_copy_to() {
    let mut driver = Driver::new(CoreConfig { block_size: 4, num_blocks: 2, ..small() });
    let first = request(1, &[9], 3);
    let forked = Request { num_sequences: 2, ..request(2, &[1, 2, 3], 3) };
    driver.submit(first.clone());
    driver.submit(forked.clone());
    assert_eq!(driver.plan().num_outputs, 3);
    driver.commit();
    let sizes = driver.plan();
    assert_eq!((sizes.num_rows, sizes.num_copies), (2, 0));
    assert_eq!(driver.core.stats().num_preemptions, 1);
    driver.commit();
    driver.run_to_end(20);
    driver.assert_exact(&first);
    driver.assert_exact(&forked);
}

#[test]
fn a_block_that_a_step_in_flight_fills_is_shared_though_its_row_was_preempted() {
    let config = CoreConfig { num_blocks: 4, max_num_steps_in_flight: 3, ..small() };
    let mut driver = Driver::new(config);
    let wanted = [request(1, &[1; 3], 3), request(2, &[2; 3], 3)];
    for request in &wanted {
        driver.submit(request.clone());
    }
    driver.plan();
    driver.plan();
    assert_eq!(driver.plan().num_rows, 0, "the first waits for the blocks of the second");
    assert_eq!(driver.core.stats().num_preemptions, 1);
    driver.commit();
    driver.commit();
    let stats = driver.core.stats();
    assert_eq!((stats.held, stats.cached, stats.free), (2, 2, 0));
    driver.run_to_end(10);
    for request in &wanted {
        driver.assert_exact(request);
    }
}

/// A token that was kept for a row with one to go, which then finds no block, goes to a long prompt that had
/// its turn before, and that nothing but the budget held back.
#[test]
fn a_long_prompt_takes_the_token_of_a_row_that_has_no_block() {
    let config = CoreConfig {
        num_blocks: 2,
        block_size: 8,
        max_model_len: 16,
        max_num_batched_tokens: 5,
        long_prefill_threshold: Some(2),
        max_long_prefill_percent: 100,
        scheduling_policy: PolicyKind::Priority,
        max_wait: None,
        ..small()
    };
    let mut driver = Driver::new(config);
    let wanted = [
        Request { priority: 9, ..request(1, &[1; 8], 3) },
        Request { priority: 0, ..request(2, &[2; 8], 1) },
    ];
    driver.submit(wanted[0].clone());
    assert_eq!(driver.plan().num_tokens, 5);
    driver.commit();
    driver.submit(wanted[1].clone());
    assert_eq!(driver.plan().num_tokens, 5, "three, and two of the other's");
    driver.commit();
    let sizes = driver.plan();
    assert_eq!((sizes.num_rows, sizes.num_tokens), (1, 5), "four, and the one that was kept");
    assert_eq!(driver.core.stats().num_preemptions, 1);
    driver.commit();
    driver.run_to_end(10);
    for request in &wanted {
        driver.assert_exact(request);
    }
}
