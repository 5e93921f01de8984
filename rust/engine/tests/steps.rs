//! What a step holds, and what becomes of its results.

mod driver;

use driver::{Driver, expected, next_token, request, small};
use fastserve_base::{
    CoreConfig, FinishReason, Namespace, PolicyKind, Request, RequestId, SeqId, StepError, StepId,
};
use fastserve_engine::{Core, EventKind, Results, StepOutputs};

#[test]
fn steps_are_driven_in_turn_or_refused() {
    let mut driver = Driver::new(small());
    let words = driver.core.layout().words;
    let error = driver.core.plan(0, &mut vec![0; words - 1]).expect_err("short");
    assert_eq!(error, StepError::ArenaTooSmall { words: words - 1, needed: words });
    let results = Results { counts: &[1], tokens: &[1] };
    let error = driver.core.commit(StepId(1), 0, results).expect_err("nothing planned");
    assert_eq!(error.to_string(), "step 1 cannot be committed now; no step is in flight");

    driver.submit(request(1, &[1, 2], 3));
    assert_eq!(driver.plan().step, StepId(1));
    let error = driver.core.plan(0, &mut driver.arena).expect_err("one in flight");
    assert_eq!(
        error.to_string(),
        "1 steps are in flight, max_num_steps_in_flight=1; commit one first"
    );
    let error = driver.core.commit(StepId(2), 0, results).expect_err("out of order");
    assert_eq!(error.to_string(), "step 2 cannot be committed now; step 1 is next");
    assert!(matches!(driver.core.fail(StepId(2), 0), Err(StepError::OutOfOrder { .. })));

    let bad = |counts: &[i32], tokens: &[i32], core: &mut Core| {
        let results = Results { counts, tokens };
        core.commit(StepId(1), 0, results).expect_err("refused").to_string()
    };
    let core = &mut driver.core;
    assert_eq!(bad(&[1, 1], &[1, 1], core), "step 1 has 1 outputs, the results have 2");
    assert_eq!(bad(&[1], &[], core), "step 1 has 1 outputs, the results have 0");
    assert_eq!(
        bad(&[2], &[1], core),
        "output row 0 of step 1: count=2, want 1, or a negative number for an error"
    );
    assert_eq!(
        bad(&[0], &[1], core),
        "output row 0 of step 1: count=0, want 1, or a negative number for an error"
    );
    assert_eq!(bad(&[1], &[97], core), "output row 0 of step 1: token=97, want 0 to 96");
    assert_eq!(bad(&[1], &[-1], core), "output row 0 of step 1: token=-1, want 0 to 96");
    core.check();
    driver.commit();
    driver.run_to_end(5);
    driver.assert_exact(&request(1, &[1, 2], 3));
}

#[test]
fn prefill_never_displaces_decode() {
    let config = CoreConfig { max_num_batched_tokens: 4, ..small() };
    let mut driver = Driver::new(config);
    for id in 1..=2 {
        driver.submit(request(id, &[id as u32], 20));
    }
    driver.step();
    driver.submit(request(3, &[9; 12], 1));
    for _ in 0..6 {
        let sizes = driver.plan();
        assert_eq!((sizes.num_rows, sizes.num_tokens), (3, 4));
        let view = driver.view();
        let lens: Vec<i32> = view.query_indptr().windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(lens, [1, 1, 2], "the long prompt has what the two streams leave");
        driver.commit();
    }
    driver.run_to_end(20);
    driver.assert_exact(&request(3, &[9; 12], 1));
}

#[test]
fn long_prompts_take_their_share_and_the_rest_if_nobody_wants_it() {
    let config = CoreConfig {
        max_num_batched_tokens: 12,
        long_prefill_threshold: Some(8),
        max_long_prefill_percent: 50,
        ..small()
    };
    let mut driver = Driver::new(config);
    driver.submit(request(1, &[9; 30], 1));
    assert_eq!(driver.plan().num_tokens, 12, "alone, it has the whole budget");
    driver.commit();
    driver.submit(request(2, &[1, 2, 3, 4, 5], 1));
    driver.submit(request(3, &[6; 7], 1));
    driver.plan();
    let mut takes: Vec<(i32, i32)> = driver
        .view()
        .row_slots()
        .iter()
        .zip(driver.view().query_indptr().windows(2))
        .map(|(&slot, pair)| (slot, pair[1] - pair[0]))
        .collect();
    takes.sort_unstable();
    assert_eq!(takes, [(0, 6), (1, 5), (2, 1)], "half for the long one, the rest for the short");
    driver.commit();
    driver.run_to_end(20);
    driver.assert_exact(&request(1, &[9; 30], 1));
}

#[test]
fn chunks_are_capped() {
    let config = CoreConfig { max_chunk_tokens: Some(3), ..small() };
    let mut driver = Driver::new(config);
    driver.submit(request(1, &[5; 10], 2));
    let mut takes = Vec::new();
    while driver.core.has_work() {
        takes.push(driver.plan().num_tokens);
        driver.commit();
    }
    assert_eq!(takes, [3, 3, 3, 1, 1]);
    driver.assert_exact(&request(1, &[5; 10], 2));
}

#[test]
fn a_stop_token_ends_a_sequence_but_not_before_min_tokens() {
    let prompt = [3, 4, 5];
    let free = request(1, &prompt, 12);
    let tokens = expected(&free);
    let second = tokens[1];
    let again = tokens[2..].iter().position(|&token| token == second);
    for (min_tokens, want) in [(0, 2), (2, 2), (3, again.map_or(12, |at| at + 3))] {
        let absent = (0..97).find(|token| !tokens.contains(token)).expect("12 of 97");
        for extra in [vec![], vec![absent]] {
            let mut stops = vec![second];
            stops.extend(extra);
            let mut driver = Driver::new(small());
            driver.submit(Request { min_tokens, stop_token_ids: stops, ..free.clone() });
            driver.run_to_end(30);
            let ended = driver.ended(1);
            assert_eq!(ended.tokens, tokens[..want], "min_tokens={min_tokens}");
            assert_eq!(ended.num_output_tokens as usize, want);
            if want < 12 {
                assert_eq!((ended.reason, ended.stop_token), (1, second as i32));
            } else {
                assert_eq!((ended.reason, ended.stop_token), (2, -1));
            }
        }
    }
}

#[test]
fn an_error_row_ends_its_sequence_alone() {
    let mut driver = Driver::new(small());
    driver.submit(request(1, &[1], 4));
    driver.submit(request(2, &[2], 4));
    driver.plan();
    driver.pending().1[0] = -7;
    driver.commit();
    assert_eq!((driver.ended(1).reason, driver.ended(1).tokens.len()), (4, 0));
    driver.run_to_end(10);
    driver.assert_exact(&request(2, &[2], 4));
    assert_eq!(driver.core.stats().num_finished_error, 1);
}

#[test]
fn forks_share_the_prompt_and_copy_one_block_at_most() {
    for (prompt, copies) in [(vec![1, 2, 3, 4, 5], 2), (vec![1, 2, 3, 4], 0)] {
        let wanted = Request { num_sequences: 3, ..request(1, &prompt, 4) };
        let mut driver = Driver::new(small());
        driver.submit(wanted.clone());
        let sizes = driver.plan();
        assert_eq!((sizes.num_rows, sizes.num_outputs), (1, 3), "one row, three outputs");
        let blocks = prompt.len().div_ceil(2) as u64;
        assert_eq!(driver.core.stats().held, blocks, "the prompt's blocks are held once");
        driver.commit();
        driver.run_to_end(10);
        driver.assert_exact(&wanted);
        let stats = driver.core.stats();
        assert_eq!((stats.num_forks, stats.num_copied_blocks), (2, copies));
        assert_eq!(stats.num_prompt_tokens, prompt.len() as u64, "the prompt is computed once");
    }
}

#[test]
fn forks_without_a_slot_or_an_output_row_wait_and_match() {
    for config in [
        CoreConfig { max_num_seqs: 2, ..small() },
        CoreConfig { max_num_output_rows: 4, ..small() },
    ] {
        let wanted = Request { num_sequences: 5, ..request(1, &[1, 2, 3, 4, 5], 4) };
        let mut driver = Driver::new(config);
        driver.submit(wanted.clone());
        driver.run_to_end(60);
        driver.assert_exact(&wanted);
        assert!(driver.core.stats().prefix_cache_hits >= 4);
    }
}

#[test]
fn abort_and_finish_work_in_every_state() {
    let mut driver = Driver::new(CoreConfig { max_num_seqs: 2, ..small() });
    assert!(!driver.inbox.abort(RequestId(1)), "nobody knows it");
    driver.submit(request(1, &[1], 9));
    assert!(driver.inbox.abort(RequestId(1)), "in the inbox");
    assert!(driver.inbox.has_commands());
    driver.step();
    assert!(!driver.inbox.has_commands());
    assert_eq!(driver.ended(1).reason, 3);
    assert!(!driver.inbox.abort(RequestId(1)), "ended");

    for id in 2..=4 {
        driver.submit(request(id, &[id as u32; 3], 9));
    }
    driver.step();
    assert!(driver.inbox.abort(RequestId(4)), "waiting");
    assert!(driver.inbox.abort(RequestId(2)), "running");
    assert!(driver.inbox.abort(RequestId(2)), "twice");
    let seq = SeqId { request: RequestId(3), index: 0 };
    assert!(driver.inbox.finish(seq, FinishReason::Stop, 1));
    assert!(!driver.inbox.finish(SeqId { index: 1, ..seq }, FinishReason::Stop, 1), "no such one");
    driver.step();
    assert_eq!((driver.ended(4).reason, driver.ended(2).reason), (3, 3));
    assert_eq!((driver.ended(3).reason, driver.ended(3).num_output_tokens), (1, 1));
    driver.run_to_end(2);

    // In flight: the result comes too late, and the blocks go back at the commit.
    driver.submit(request(5, &[7; 3], 9));
    driver.plan();
    driver.inbox.abort(RequestId(5));
    driver.commit();
    assert_eq!(driver.ended(5).tokens.len(), 1, "the abort takes effect at the next plan");
    driver.run_to_end(2);
    assert_eq!(driver.ended(5).reason, 3);
}

#[test]
fn finishing_a_sequence_that_is_still_to_fork_leaves_its_siblings() {
    let wanted = Request { num_sequences: 3, ..request(1, &[1, 2, 3], 2) };
    for index in 0..3 {
        let mut driver = Driver::new(small());
        driver.submit(wanted.clone());
        let seq = SeqId { request: RequestId(1), index };
        assert!(driver.inbox.finish(seq, FinishReason::Stop, 0));
        driver.run_to_end(20);
        for sibling in 0..3 {
            let ended = &driver.results[&(1, sibling)];
            if sibling == index {
                assert_eq!((ended.reason, ended.tokens.len()), (1, 0), "{index}");
            } else {
                assert_eq!(ended.tokens, expected(&wanted));
            }
        }
    }
}

#[test]
fn scores_are_wanted_at_every_prompt_position_once() {
    let config = CoreConfig { max_num_output_rows: 4, max_num_batched_tokens: 8, ..small() };
    for spare in [0, 2, 12] {
        let config = CoreConfig { max_num_output_rows: 4 + spare, ..config.clone() };
        let mut driver = Driver::new(config);
        driver.submit(request(1, &[1, 2, 3, 4, 5, 6], 1));
        driver.run_to_end(3);
        driver.results.clear();
        driver.submit(Request { score_prompt: true, ..request(1, &[1, 2, 3, 4, 5, 6], 2) });
        let mut scored = Vec::new();
        while driver.core.has_work() {
            assert!(driver.plan().num_outputs <= 4 + spare);
            let view = driver.view();
            for (&row, &kind) in view.out_rows().iter().zip(view.out_kinds()) {
                if kind == 2 {
                    scored.push(view.positions()[row as usize]);
                }
            }
            driver.commit();
        }
        assert_eq!(scored, [0, 1, 2, 3, 4], "logits at p score token p + 1");
        driver.assert_exact(&request(1, &[1, 2, 3, 4, 5, 6], 2));
        assert_eq!(driver.ended(1).num_cached_tokens, 0, "no position is skipped");
    }
}

#[test]
fn followers_compute_a_long_prefix_once() {
    let config = CoreConfig {
        max_num_seqs: 16,
        num_blocks: 256,
        max_chunk_tokens: Some(8),
        max_num_output_rows: 16,
        max_model_len: 64,
        ..small()
    };
    let mut driver = Driver::new(config);
    let mut requests = Vec::new();
    for id in 0..12 {
        let mut prompt: Vec<u32> = (0..40).collect();
        prompt.extend([50 + id, 51 + id]);
        requests.push(request(u64::from(id), &prompt, 3));
    }
    for request in &requests {
        driver.submit(request.clone());
    }
    driver.run_to_end(60);
    for request in &requests {
        driver.assert_exact(request);
    }
    let stats = driver.core.stats();
    assert_eq!(stats.num_prompt_tokens, 40 + 12 * 2, "the prefix once, then each its own");
    assert_eq!(stats.prefix_cache_hits, 11 * 40);
    assert!(stats.num_leader_waits > 0);
    let waited = driver.inbox.timeline(RequestId(5));
    assert!(waited.iter().any(|event| matches!(event.kind, EventKind::LeaderWait { leader: 0 })));
}

#[test]
fn rows_that_share_blocks_stand_beside_each_other() {
    let config = CoreConfig { max_num_seqs: 8, num_blocks: 128, ..small() };
    let mut driver = Driver::new(config);
    let prompt = |head: u32, tail: u32| [head, head, head, head, tail];
    for (id, head) in [(1, 10), (2, 20), (3, 10), (4, 20)] {
        driver.submit(request(id, &prompt(head, id as u32), 10));
        driver.step();
    }
    driver.plan();
    assert_eq!(driver.view().row_slots(), [0, 2, 1, 3]);
    assert_eq!(driver.view().num_shared_blocks(), [0, 2, 0, 2]);
    driver.commit();
}

#[test]
fn namespaces_do_not_share() {
    let mut driver = Driver::new(small());
    for (id, namespace) in [(1, 0), (2, 7), (3, 7)] {
        driver.submit(Request { namespace: Namespace(namespace), ..request(id, &[4; 6], 1) });
        driver.run_to_end(3);
    }
    let cached: Vec<u32> = (1..=3).map(|id| driver.ended(id).num_cached_tokens).collect();
    assert_eq!(cached, [0, 0, 4]);
    driver.core.reset_prefix_cache();
    assert_eq!(driver.core.stats().cached, 0);
    assert!(driver.core.snapshot().is_empty());
    driver.submit(Request { namespace: Namespace(7), ..request(4, &[4; 6], 1) });
    driver.run_to_end(3);
    assert_eq!(driver.ended(4).num_cached_tokens, 0);
}

#[test]
fn a_preempted_sequence_resumes_and_is_not_called_a_hit() {
    let config = CoreConfig { num_blocks: 10, max_model_len: 20, ..small() };
    let mut driver = Driver::new(config);
    let (first, second) = (request(1, &[1, 2, 3, 4], 14), request(2, &[5, 6, 7, 8], 14));
    driver.submit(first.clone());
    driver.submit(second.clone());
    driver.run_to_end(60);
    driver.assert_exact(&first);
    driver.assert_exact(&second);
    let stats = driver.core.stats();
    assert_eq!(stats.num_preemptions, 1, "the second, once");
    assert_eq!(stats.prefix_cache_hits, 0);
    assert!(stats.num_recomputed_tokens > 0);
    let preempted = driver.inbox.timeline(RequestId(2));
    assert!(preempted.iter().any(|event| matches!(event.kind, EventKind::Preempted { by: 0, .. })));
    assert!(
        driver
            .inbox
            .timeline(RequestId(1))
            .iter()
            .all(|event| !matches!(event.kind, EventKind::Preempted { .. }))
    );
}

#[test]
fn unknown_tokens_are_named_by_their_slot() {
    let config = CoreConfig { max_num_steps_in_flight: 2, ..small() };
    let mut driver = Driver::new(config);
    driver.submit(request(1, &[1, 2, 3], 4));
    driver.plan();
    let second = driver.plan();
    assert_eq!((second.step, second.num_tokens), (StepId(2), 1));
    assert_eq!(driver.view().token_ids(), [-1]);
    assert_eq!(driver.view().positions(), [3]);
    assert!(matches!(
        driver.core.plan(0, &mut driver.arena),
        Err(StepError::TooManyInFlight { in_flight: 2, limit: 2 })
    ));
    driver.commit();
    driver.plan();
    driver.commit();
    driver.plan();
    driver.commit();
    assert_eq!(
        driver.plan().num_rows,
        0,
        "the last token is on its way, nothing is left to compute"
    );
    driver.commit();
    driver.assert_exact(&request(1, &[1, 2, 3], 4));
    assert_eq!(driver.core.stats().held, 0);
}

#[test]
fn failed_steps_are_computed_again_and_end_in_an_error_at_last() {
    let config = CoreConfig { max_num_steps_in_flight: 2, max_num_step_failures: 2, ..small() };
    let mut driver = Driver::new(config);
    let (first, second) = (request(1, &[1, 2, 3, 4, 5], 6), request(2, &[1, 2, 3, 4, 9], 6));
    driver.submit(first.clone());
    driver.submit(second.clone());
    driver.plan();
    driver.plan();
    driver.fail();
    assert_eq!(driver.core.stats().num_failed_steps, 2, "the step on top went with it");
    assert_eq!(driver.core.stats().num_rollbacks, 2);
    assert_eq!(driver.core.stats().cached, 0, "nothing of a failed step can be matched");
    assert_eq!(driver.core.stats().held, 0);
    driver.run_to_end(40);
    driver.assert_exact(&first);
    driver.assert_exact(&second);

    let third = request(3, &[7, 7, 7], 5);
    driver.submit(third);
    for _ in 0..3 {
        driver.plan();
        driver.fail();
    }
    assert_eq!(driver.ended(3).reason, 4);
    driver.run_to_end(1);
    let failures: Vec<u32> = driver
        .inbox
        .timeline(RequestId(3))
        .iter()
        .filter_map(|event| match event.kind {
            EventKind::RolledBack { failures } => Some(failures),
            _ => None,
        })
        .collect();
    assert_eq!(failures, [1, 2, 3]);
}

#[test]
fn a_token_forgives_earlier_failures() {
    let config = CoreConfig { max_num_step_failures: 1, ..small() };
    let mut driver = Driver::new(config);
    let wanted = request(1, &[7, 7, 7], 5);
    driver.submit(wanted.clone());
    for _ in 0..4 {
        driver.plan();
        driver.fail();
        driver.plan();
        driver.commit();
    }
    driver.run_to_end(5);
    driver.assert_exact(&wanted);
}

/// A chunk that a match in its turn leaves one token had no token kept for it, and gives none back when
/// it finds no block and steps aside.
#[test]
fn a_chunk_that_becomes_one_token_gives_back_none() {
    let config = CoreConfig {
        num_blocks: 10,
        block_size: 1,
        max_model_len: 10,
        max_num_batched_tokens: 4,
        long_prefill_threshold: Some(1),
        max_long_prefill_percent: 25,
        scheduling_policy: PolicyKind::Priority,
        max_wait: None,
        ..small()
    };
    let mut driver = Driver::new(config);
    let wanted = [
        Request { priority: 0, ..request(1, &[9], 6) },
        Request { priority: 0, namespace: Namespace(1), ..request(5, &[9], 6) },
        Request { priority: 9, ..request(2, &[1; 5], 1) },
        Request { priority: 1, ..request(3, &[1; 4], 1) },
        Request { priority: 1, ..request(4, &[9, 1, 9, 1], 1) },
    ];
    for request in &wanted[..3] {
        driver.submit(request.clone());
    }
    for next in [Some(&wanted[3]), Some(&wanted[4]), None] {
        assert!(driver.plan().num_tokens <= 4, "{:?}", driver.sizes);
        driver.commit();
        if let Some(request) = next {
            driver.submit(request.clone());
        }
    }
    assert!(driver.core.stats().num_preemptions > 0, "somebody steps aside");
    driver.run_to_end(40);
    for request in &wanted {
        driver.assert_exact(request);
    }
}

#[test]
fn outputs_wait_until_they_are_taken() {
    let mut driver = Driver::new(small());
    driver.submit(request(1, &[1, 2], 1));
    driver.plan();
    let token = next_token(&[1, 2]) as i32;
    let results = Results { counts: &[1], tokens: &[token] };
    driver.core.commit(StepId(1), 9, results).expect("fits");
    assert!(driver.core.has_work(), "somebody has to fetch them");
    let mut outputs = StepOutputs::default();
    driver.core.take_outputs(&mut outputs);
    assert_eq!((outputs.len(), outputs.is_empty()), (1, false));
    assert_eq!((outputs.source_rows[0], outputs.token_indptr.as_slice()), (0, &[0, 1][..]));
    assert_eq!((outputs.tokens[0], outputs.finish_reasons[0]), (token, 2));
    driver.core.take_outputs(&mut outputs);
    assert!(outputs.is_empty() && outputs.token_indptr == [0]);
    assert!(!driver.core.has_work());
}
