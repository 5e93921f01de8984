//! Who gets in, in what order, and what is refused at the door.

mod driver;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Wake, Waker};

use driver::{Driver, request, small};
use fastserve_base::{
    CoreConfig, FinishReason, LayerGroup, PolicyKind, Request, RequestError, RequestId, SeqId, Span,
};
use fastserve_engine::{Candidate, Core, EventKind, Lifecycle, Policy};

fn refusal(config: CoreConfig, request: Request) -> String {
    let driver = Driver::new(config);
    let error = driver.inbox.submit(request).expect_err("it is refused");
    assert!(!driver.core.has_work(), "nothing was queued");
    error.to_string()
}

#[test]
fn a_refusal_names_the_value_the_limit_and_the_remedy() {
    let cases: Vec<(Request, &str)> = vec![
        (request(1, &[], 4), "prompt is empty; a request needs at least one token"),
        (
            request(1, &[5, 97], 4),
            "token id 97 at position 1 is outside the vocabulary of 97 (0 to 96)",
        ),
        (
            request(1, &[1; 40], 4),
            "prompt has 40 tokens; with one to generate that is more than max_model_len=40; shorten the prompt",
        ),
        (request(1, &[1], 0), "max_tokens=0: want at least 1"),
        (Request { min_tokens: 5, ..request(1, &[1], 4) }, "min_tokens=5: want 0 to 4"),
        (Request { num_sequences: 0, ..request(1, &[1], 4) }, "num_sequences=0: want 1 to 128"),
        (Request { num_sequences: 129, ..request(1, &[1], 4) }, "num_sequences=129: want 1 to 128"),
        (
            Request { stop_token_ids: vec![200], ..request(1, &[1], 4) },
            "token id 200 at position 0 is outside the vocabulary of 97 (0 to 96)",
        ),
        (
            Request { sampling: vec![0; 4097], ..request(1, &[1], 4) },
            "sampling words=4097: want 0 to 4096",
        ),
    ];
    for (request, want) in cases {
        assert_eq!(refusal(small(), request), want);
    }
    for spans in [
        vec![Span { start: 0, end: 4, digest: 1 }],
        vec![Span { start: 2, end: 2, digest: 1 }],
        vec![Span { start: 0, end: 2, digest: 1 }, Span { start: 1, end: 3, digest: 1 }],
    ] {
        let last = spans.len() - 1;
        let (start, end) = (spans[last].start, spans[last].end);
        let want = format!(
            "span {last} ({start}..{end}) must be inside the prompt of 3 tokens and after the span before it"
        );
        assert_eq!(refusal(small(), Request { spans, ..request(1, &[1, 2, 3], 4) }), want);
    }
}

#[test]
fn the_longest_prompt_gets_one_token_and_the_pool_is_named_where_it_limits() {
    let mut driver = Driver::new(small());
    let longest = request(1, &[3; 39], 10);
    driver.submit(longest);
    driver.run_to_end(10);
    assert_eq!(driver.ended(1).tokens.len(), 1);
    assert_eq!(driver.ended(1).reason, 2);

    let tiny = CoreConfig { num_blocks: 3, ..small() };
    let core = Core::new(tiny.clone()).expect("legal");
    assert_eq!(core.config().max_model_len, 6);
    assert_eq!(
        core.warnings(),
        ["max_model_len lowered from 40 to 6, which is what 3 blocks of 2 tokens hold"]
    );
    assert!(refusal(tiny, request(1, &[1; 6], 1)).ends_with("or give the KV pool more blocks"));
}

#[test]
fn every_bad_field_is_named_at_once() {
    let bad = CoreConfig {
        block_size: 3,
        num_blocks: 0,
        max_chunk_tokens: Some(0),
        max_long_prefill_percent: 101,
        max_num_mixed_prefill_tokens: Some(0),
        context_per_token: Some((1 << 24) + 1),
        max_num_output_rows: 0,
        max_num_steps_in_flight: 9,
        max_num_draft_tokens: 1,
        max_num_tickets: 4097,
        watermark_blocks: 1,
        vocab_size: 0,
        max_num_sequences_per_request: 0,
        groups: vec![LayerGroup { layers: 0, window: Some(0) }; 2],
        ..small()
    };
    let problems = Core::new(bad).err().expect("refused").problems;
    let fields: Vec<&str> =
        problems.iter().map(|problem| problem.split('=').next().expect("a name")).collect();
    assert_eq!(
        fields,
        [
            "block_size",
            "num_blocks",
            "max_chunk_tokens",
            "max_long_prefill_percent",
            "max_num_mixed_prefill_tokens",
            "context_per_token",
            "max_num_output_rows",
            "max_num_steps_in_flight",
            "max_num_draft_tokens",
            "max_num_tickets",
            "watermark_blocks",
            "vocab_size",
            "max_num_sequences_per_request",
            "groups",
            "groups.layers",
            "groups.window",
            "groups.layers",
            "groups.window",
        ]
    );
    let huge = CoreConfig { num_blocks: 1 << 30, block_size: 2, ..small() };
    let problems = Core::new(huge).err().expect("refused").problems;
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(
        problems[0].starts_with("num_blocks=1073741824: want num_blocks * block_size below 2^31")
    );
}

#[test]
fn rows_never_outnumber_the_token_budget() {
    let config = CoreConfig { max_num_batched_tokens: 2, ..small() };
    let core = Core::new(config).expect("legal");
    assert_eq!(core.config().max_num_seqs, 2);
    assert_eq!(core.warnings().len(), 1);
}

#[test]
fn a_full_queue_says_when_to_come_back() {
    let config = CoreConfig { max_num_queued_requests: 2, max_num_queued_tokens: 10, ..small() };
    let driver = Driver::new(config);
    driver.submit(request(1, &[1; 8], 1));
    let error = driver.inbox.submit(request(2, &[1; 3], 1)).expect_err("11 tokens");
    assert!(matches!(error, RequestError::QueueTokensFull { queued: 8, prompt: 3, limit: 10, .. }));
    assert_eq!(error.http_status(), 429);
    driver.submit(request(2, &[1; 2], 1));
    let error = driver.inbox.submit(request(3, &[1], 1)).expect_err("two wait");
    assert!(matches!(error, RequestError::QueueFull { limit: 2, .. }));
    assert!(error.to_string().contains("retry in about 1.0 s"), "{error}");
    assert_eq!(driver.inbox.stats().num_waiting, 2);
    assert_eq!(driver.inbox.stats().num_queued_tokens, 10);

    let mut driver = driver;
    driver.step();
    driver.submit(request(3, &[1; 9], 1));
    driver.run_to_end(10);
}

#[test]
fn a_prompt_larger_than_the_token_limit_is_taken_by_an_empty_queue() {
    let driver = Driver::new(CoreConfig { max_num_queued_tokens: 4, ..small() });
    driver.submit(request(1, &[1; 20], 1));
}

#[test]
fn predicted_wait_follows_the_measured_rate() {
    let mut driver = Driver::new(small());
    driver.submit(request(1, &[1; 16], 20));
    for _ in 0..12 {
        driver.step();
    }
    // A step of one token takes 1 ms from plan to commit here.
    driver.submit(request(2, &[1; 30], 1));
    let wait = driver.inbox.predicted_wait();
    assert!((20_000_000..=31_000_000).contains(&wait), "30 tokens at one a millisecond: {wait}");
    assert_eq!(Driver::new(small()).inbox.predicted_wait(), 1_000_000_000, "nothing known yet");
}

#[test]
fn ids_are_free_again_when_a_request_has_ended() {
    let mut driver = Driver::new(small());
    driver.submit(request(1, &[1], 2));
    let twice = driver.inbox.submit(request(1, &[1], 2));
    assert_eq!(twice, Err(RequestError::DuplicateRequest { id: RequestId(1) }));
    assert!(driver.inbox.is_live(RequestId(1)));
    driver.run_to_end(10);
    assert!(!driver.inbox.is_live(RequestId(1)));
    driver.results.clear();
    driver.submit(request(1, &[1], 2));
    driver.run_to_end(10);
    driver.assert_exact(&request(1, &[1], 2));
}

#[test]
fn priority_orders_and_waiting_long_enough_overrides_it() {
    let order = |max_wait: Option<u64>, pause: u64| {
        let config = CoreConfig {
            scheduling_policy: PolicyKind::Priority,
            max_num_seqs: 1,
            max_wait,
            ..small()
        };
        let mut driver = Driver::new(config);
        assert_eq!(driver.core.policy_name(), "priority");
        driver.submit(Request { priority: 5, ..request(1, &[1], 1) });
        driver.core.pause();
        driver.plan();
        driver.now += pause;
        driver.submit(Request { priority: -1, ..request(2, &[1], 1) });
        driver.submit(request(3, &[1], 1));
        driver.core.resume();
        let mut ends = Vec::new();
        while driver.core.has_work() {
            driver.step();
            ends.extend(
                driver
                    .results
                    .keys()
                    .map(|key| key.0)
                    .filter(|id| !ends.contains(id))
                    .collect::<Vec<_>>(),
            );
        }
        ends
    };
    assert_eq!(order(None, 1 << 40), [2, 3, 1]);
    assert_eq!(order(Some(1_000_000_000), 1), [2, 3, 1]);
    assert_eq!(order(Some(1_000_000_000), 1_000_000_000), [1, 2, 3]);
}

#[test]
fn an_embedders_policy_orders() {
    struct ShortestPrompt;
    impl Policy for ShortestPrompt {
        fn name(&self) -> &'static str {
            "shortest-prompt"
        }
        fn rank(&mut self, candidate: &Candidate) -> i64 {
            assert_eq!(candidate.max_tokens, 1);
            i64::from(candidate.num_prompt_tokens)
        }
    }
    let config = CoreConfig { max_num_seqs: 1, ..small() };
    let core = Core::with_policy(config, Box::new(ShortestPrompt)).expect("legal");
    let mut driver = Driver::over(core);
    assert_eq!(driver.core.policy_name(), "shortest-prompt");
    for (id, length) in [(1, 9), (2, 3), (3, 6)] {
        driver.submit(request(id, &vec![id as u32; length], 1));
    }
    let mut ends = Vec::new();
    while driver.core.has_work() {
        driver.step();
        ends.extend(
            driver
                .results
                .keys()
                .map(|key| key.0)
                .filter(|id| !ends.contains(id))
                .collect::<Vec<_>>(),
        );
    }
    assert_eq!(ends, [2, 3, 1]);
}

#[test]
fn admission_leaves_the_watermark_and_what_others_need() {
    // 10 blocks of 2. The first holds 4 tokens and wants 10 more blocks' worth while it runs.
    let config = CoreConfig { num_blocks: 10, watermark_blocks: 3, ..small() };
    let mut driver = Driver::new(config);
    driver.submit(request(1, &[1, 2, 3, 4], 8));
    driver.submit(request(2, &[5; 12], 1));
    driver.step();
    // 2 held by the first; 6 wanted + 3 watermark > 8 left.
    assert_eq!(driver.core.stats().num_running, 1);
    driver.run_to_end(20);
    driver.assert_exact(&request(1, &[1, 2, 3, 4], 8));
    driver.assert_exact(&request(2, &[5; 12], 1));

    // Alone, nothing binds: neither the watermark nor what is cached.
    let config = CoreConfig { num_blocks: 10, watermark_blocks: 9, ..small() };
    let mut driver = Driver::new(config);
    for id in 0..4 {
        let request = request(id, &[id as u32 + 1; 17], 3);
        driver.submit(request.clone());
        driver.run_to_end(20);
        driver.assert_exact(&request);
    }
}

#[test]
fn a_chunk_still_to_come_is_reserved_for() {
    // The first computes 4 tokens a step and needs 8 of 10 blocks in the end.
    let config = CoreConfig { num_blocks: 10, max_chunk_tokens: Some(4), ..small() };
    let mut driver = Driver::new(config);
    driver.submit(request(1, &[1; 16], 1));
    driver.submit(request(2, &[2; 6], 1));
    driver.step();
    assert_eq!(driver.core.stats().num_running, 1, "2 + 6 + 3 blocks are more than 10");
    driver.run_to_end(20);
    assert_eq!(driver.core.stats().num_preemptions, 0);
}

#[test]
fn lifecycle_pauses_drains_and_closes() {
    let mut driver = Driver::new(small());
    assert_eq!(driver.core.state(), Lifecycle::Running);
    driver.submit(request(1, &[1, 2], 3));
    driver.step();
    driver.core.pause();
    assert_eq!(driver.inbox.state().name(), "paused");
    assert_eq!(driver.plan().num_rows, 0);
    driver.submit(request(2, &[1], 1));
    assert_eq!(driver.plan().num_rows, 0);
    assert_eq!(driver.core.stats().num_waiting, 1, "requests queue while paused");
    assert_eq!(driver.core.stats().held, 1, "K and V stay");
    driver.core.resume();
    driver.core.drain();
    driver.core.pause();
    assert_eq!(driver.core.state(), Lifecycle::Draining, "draining is not paused");
    let refused = driver.inbox.submit(request(3, &[1], 1)).expect_err("draining");
    assert_eq!(refused.to_string(), "the engine is draining and takes no new requests");
    assert_eq!((refused.http_status(), refused.code()), (503, "not_accepting"));
    driver.run_to_end(10);
    driver.assert_exact(&request(1, &[1, 2], 3));
    driver.assert_exact(&request(2, &[1], 1));
    driver.core.resume();
    driver.submit(request(3, &[1], 5));
    driver.submit(request(4, &[1, 2, 3], 5));
    driver.plan();
    driver.core.close();
    driver.core.close();
    driver.core.check();
    assert!(driver.core.stats().held > 0, "a step in flight names blocks");
    driver.commit();
    assert_eq!((driver.ended(3).reason, driver.ended(4).reason), (3, 3));
    assert!(driver.ended(3).tokens.is_empty());
    assert!(!driver.core.has_work());
    assert_eq!(driver.core.stats().held, 0);
    let error = driver.core.plan(0, &mut driver.arena).expect_err("closed");
    assert_eq!(error.to_string(), "the core is closed; make a new one");
    driver.core.resume();
    driver.core.drain();
    assert_eq!(driver.core.state(), Lifecycle::Closed);
}

#[test]
fn the_timeline_tells_a_requests_life() {
    let mut driver = Driver::new(small());
    driver.submit(request(1, &[1, 2, 3], 2));
    driver.submit(request(2, &[1, 2, 9], 1));
    driver.run_to_end(10);
    let kinds = |id| -> Vec<EventKind> {
        driver.inbox.timeline(RequestId(id)).iter().map(|event| event.kind).collect()
    };
    let finished = EventKind::Finished { reason: FinishReason::Length };
    assert_eq!(
        kinds(1),
        [
            EventKind::Queued { ahead: 0 },
            EventKind::Admitted { cached: 0, slot: 0 },
            EventKind::FirstToken,
            finished
        ]
    );
    assert_eq!(
        kinds(2),
        [
            EventKind::Queued { ahead: 1 },
            EventKind::Admitted { cached: 2, slot: 1 },
            EventKind::FirstToken,
            finished
        ]
    );
    // The last step planned when it happened: the step that admits is not planned yet.
    let events = driver.inbox.timeline(RequestId(1));
    let when: Vec<(u64, u64)> = events.iter().map(|event| (event.step.0, event.at)).collect();
    let ms = 1_000_000;
    assert_eq!(when, [(0, ms), (0, ms), (1, 2 * ms), (2, 4 * ms)]);
    assert_eq!(driver.core.timeline(RequestId(2)), driver.inbox.timeline(RequestId(2)));
    let steps = driver.inbox.steps_since(fastserve_base::StepId(2));
    assert_eq!(steps.len(), 1);
    assert_eq!((steps[0].num_rows, steps[0].num_decode_rows, steps[0].num_tokens), (1, 1, 1));
    assert_eq!(steps[0].committed_at - steps[0].planned_at, 1_000_000);
}

#[test]
fn evicted_blocks_are_counted() {
    let mut driver = Driver::new(CoreConfig { num_blocks: 6, max_model_len: 12, ..small() });
    driver.submit(request(1, &[1, 2, 3, 4, 5, 6, 7], 1));
    driver.run_to_end(10);
    let stats = driver.core.stats();
    assert_eq!((stats.cached, stats.free, stats.num_evicted_blocks), (3, 3, 0));
    // Five blocks: three are free, and two of the cached ones give way.
    driver.submit(request(2, &[11, 12, 13, 14, 15, 16, 17, 18, 19], 1));
    driver.run_to_end(10);
    assert_eq!(driver.core.stats().num_evicted_blocks, 2);
}

#[test]
fn the_first_to_come_is_not_preempted_for_one_that_aged_behind_it() {
    // Found by the simulator, seed 8627: only those that waited aged, so they went ahead of a
    // sequence that had come before them and was running all the time.
    let config = CoreConfig {
        num_blocks: 10,
        max_model_len: 20,
        max_num_seqs: 2,
        max_wait: Some(4_000_000),
        ..small()
    };
    let mut driver = Driver::new(config);
    let first = request(1, &[1, 2, 3, 4], 16);
    driver.submit(first.clone());
    driver.submit(request(2, &[9], 4)); // Keeps the third waiting until it has aged.
    let second = request(3, &[5, 6, 7, 8], 14);
    driver.submit(second.clone());
    driver.run_to_end(100);
    driver.assert_exact(&first);
    driver.assert_exact(&second);
    let preempted = |id| {
        let events = driver.inbox.timeline(RequestId(id));
        events.iter().any(|event| matches!(event.kind, EventKind::Preempted { .. }))
    };
    assert!(
        !preempted(1) && preempted(3),
        "the pool is too small for both, and the later one gives"
    );
}

#[test]
fn limits_at_the_end_of_the_numbers_are_limits() {
    let mut driver = Driver::new(small());
    let endless = Request {
        min_tokens: u32::MAX,
        stop_token_ids: (0..97).collect(),
        ..request(1, &[1, 2], u32::MAX)
    };
    driver.submit(endless);
    driver.run_to_end(60);
    assert_eq!((driver.ended(1).tokens.len(), driver.ended(1).reason), (38, 2));
}

#[test]
fn the_pool_is_known_before_the_first_plan() {
    let driver = Driver::new(small());
    let stats = driver.inbox.stats();
    assert_eq!((stats.capacity, stats.free, stats.held), (32, 32, 0));
    assert_eq!(stats, driver.core.stats());
}

/// Counts how often it was woken.
#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_waker_is_called_where_a_plan_may_find_more() {
    let mut core = Core::new(CoreConfig::default()).unwrap();
    let inbox = core.inbox();
    let count = Arc::new(Count::default());
    assert!(inbox.set_waker(Waker::from(Arc::clone(&count))));
    assert!(!inbox.set_waker(Waker::noop().clone()), "the first one stays");
    let mut woken = 0;
    let mut expect = |what: &str, times: usize| {
        woken += times;
        assert_eq!(count.0.load(Ordering::Relaxed), woken, "{what}");
    };
    let id = RequestId(7);
    inbox.submit(Request::new(id, vec![1, 2, 3], 4)).unwrap();
    expect("a submission", 1);
    inbox.submit(Request::new(id, vec![1, 2, 3], 4)).unwrap_err();
    expect("a refusal", 0);
    assert!(inbox.finish(SeqId { request: id, index: 0 }, FinishReason::Stop, 0));
    assert!(inbox.abort(id));
    expect("a finish and an abort", 2);
    assert!(!inbox.abort(RequestId(8)));
    expect("an abort of nobody", 0);
    core.plan(0, &mut vec![0; core.layout().words]).unwrap();
    expect("a plan", 0);
    core.pause();
    core.resume();
    core.close();
    expect("paused, resumed and closed", 3);
}
