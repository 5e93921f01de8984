//! What one step may hold, to the last word, block and token.

mod driver;

use driver::{Driver, request, small};
use fastserve_base::{CoreConfig, Request, StepId};

/// A prompt of `len` tokens.
fn counted(len: u32) -> Vec<u32> {
    (0..len).map(|token| token % driver::VOCAB).collect()
}

/// Requests that got a row slot in the step.
fn admitted(driver: &Driver) -> Vec<u64> {
    let view = driver.view();
    view.slot_events().filter(|event| event.assigned).map(|event| event.request).collect()
}

/// A plan has 65,536 words for sampling records and tokens, and one longest sequence's more: here
/// sixteen times 4,096 and 2.
#[test]
fn sequences_begin_in_a_step_as_far_as_their_words_fit() {
    let config = CoreConfig {
        max_num_seqs: 20,
        max_num_batched_tokens: 40,
        max_num_output_rows: 40,
        max_model_len: 32,
        num_blocks: 64,
        ..small()
    };
    let sampled = |id: u64| Request { sampling: vec![1; 4096], ..request(id, &[id as u32; 2], 2) };
    let mut driver = Driver::new(config.clone());
    for id in 0..17 {
        driver.submit(sampled(id));
    }
    assert_eq!(driver.plan().num_rows, 16);
    driver.commit();
    assert_eq!(driver.plan().num_rows, 17);
    driver.commit();
    driver.run_to_end(3);

    let mut driver = Driver::new(config);
    let wanted = Request { num_sequences: 17, ..sampled(1) };
    driver.submit(wanted.clone());
    let sizes = driver.plan();
    assert_eq!((sizes.num_rows, sizes.num_outputs), (1, 16), "one of seventeen waits");
    driver.commit();
    driver.run_to_end(5);
    driver.assert_exact(&wanted);
}

/// A plan has room for 4,096 matched blocks and one longest sequence's more.
#[test]
fn blocks_are_matched_in_a_step_as_far_as_it_can_tell_the_device() {
    let config = CoreConfig {
        num_blocks: 512,
        max_num_seqs: 128,
        max_num_batched_tokens: 256,
        max_num_output_rows: 192,
        ..small()
    };
    // 42 times 99 matched blocks leave the 100 that another sequence may need.
    let mut driver = Driver::new(CoreConfig { max_model_len: 2 * 162, ..config.clone() });
    driver.submit(request(0, &counted(200), 1));
    driver.run_to_end(2);
    for id in 1..=50 {
        driver.submit(request(id, &counted(200), 1));
    }
    assert_eq!(driver.plan().num_rows, 43);
    driver.commit();
    assert_eq!(driver.plan().num_rows, 7);
    driver.commit();

    // Forks take their prompt's 100 blocks, 42 of them.
    let mut driver = Driver::new(CoreConfig { max_model_len: 2 * 104, ..config });
    let wanted = Request { num_sequences: 50, ..request(1, &counted(200), 2) };
    driver.submit(wanted.clone());
    let sizes = driver.plan();
    assert_eq!((sizes.num_rows, sizes.num_outputs), (1, 43));
    driver.commit();
    driver.run_to_end(5);
    driver.assert_exact(&wanted);
}

#[test]
fn so_many_step_aside_in_a_step_and_nobody_without_a_token_to_have() {
    for (max_num_batched_tokens, waits) in [(16, 256), (4, 0)] {
        let config = CoreConfig { max_num_batched_tokens, max_chunk_tokens: Some(4), ..small() };
        let mut driver = Driver::new(config);
        for id in 0..300 {
            driver.submit(request(id, &counted(12), 1));
        }
        driver.plan();
        assert_eq!(admitted(&driver), [0]);
        assert_eq!(driver.core.stats().num_leader_waits, waits);
        driver.commit();
    }
}

#[test]
fn a_short_prompt_passes_a_long_one_that_finds_the_share_of_long_ones_taken() {
    let config = CoreConfig {
        max_num_batched_tokens: 12,
        long_prefill_threshold: Some(8),
        max_long_prefill_percent: 50,
        ..small()
    };
    let mut driver = Driver::new(config);
    let wanted = [request(1, &[9; 30], 1), request(2, &[8; 30], 1), request(3, &[7; 5], 1)];
    for request in &wanted {
        driver.submit(request.clone());
    }
    assert_eq!(driver.plan().num_tokens, 12);
    assert_eq!(admitted(&driver), [1, 3]);
    driver.commit();
    driver.run_to_end(20);
    for request in &wanted {
        driver.assert_exact(request);
    }
}

#[test]
fn only_blocks_that_are_not_matched_must_be_there_at_admission() {
    let mut driver = Driver::new(CoreConfig { num_blocks: 6, ..small() });
    let wanted =
        [request(1, &[1, 2, 3, 4, 5, 6, 7, 8, 9], 2), request(2, &[1, 2, 3, 4, 5, 6, 7, 8, 10], 1)];
    driver.submit(wanted[0].clone());
    driver.step();
    assert_eq!(driver.core.stats().free, 1);
    driver.submit(wanted[1].clone());
    assert_eq!(driver.plan().num_rows, 2, "four of its five blocks are matched");
    driver.commit();
    for request in &wanted {
        driver.assert_exact(request);
    }
}

#[test]
fn a_matched_block_is_no_room_for_another() {
    let prefix = [1, 2, 3, 4, 5, 6, 7, 8];
    for (len, num_rows) in [(10, 2), (11, 1)] {
        let mut driver = Driver::new(CoreConfig { num_blocks: 6, ..small() });
        driver.submit(request(1, &[1, 2, 3, 4, 5, 6, 7, 8, 9], 1));
        driver.run_to_end(2);
        driver.submit(request(2, &[50], 2));
        driver.step();
        let stats = driver.core.stats();
        assert_eq!((stats.free, stats.cached), (1, 4));
        let mut prompt = prefix.to_vec();
        prompt.resize(len, 60);
        let wanted = request(3, &prompt, 1);
        driver.submit(wanted.clone());
        assert_eq!(driver.plan().num_rows, num_rows, "one or two blocks beside the four matched");
        driver.commit();
        driver.run_to_end(5);
        driver.assert_exact(&wanted);
    }
}

#[test]
fn the_rings_keep_the_last_in_order() {
    let config = CoreConfig { num_step_records: 3, num_timeline_events: 3, ..small() };
    for num_steps in 1..=7 {
        let mut driver = Driver::new(config.clone());
        let wanted = request(1, &[1], num_steps);
        driver.submit(wanted.clone());
        driver.run_to_end(7);
        let records = driver.inbox.steps_since(StepId(0));
        let steps: Vec<u64> = records.iter().map(|record| record.step.0).collect();
        let all: Vec<u64> = (1..=u64::from(num_steps)).collect();
        assert_eq!(steps, all[all.len().saturating_sub(3)..]);
        // Admitted, first token, finished; queued is forgotten.
        let at: Vec<u64> = driver.inbox.timeline(wanted.id).iter().map(|event| event.at).collect();
        assert!(at.len() == 3 && at.is_sorted(), "{at:?}");
    }
}
