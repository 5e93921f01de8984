//! Drives a core with a model whose next token is the sum of its prefix, modulo the vocabulary.
#![allow(dead_code, unreachable_pub, reason = "each test uses its part")]

use std::collections::BTreeMap;

use fastserve_base::{CoreConfig, FinishReason, Request, RequestId, StepId};
use fastserve_engine::{Core, Inbox, PlanSizes, PlanView, Results, StepOutputs};

pub const VOCAB: u32 = 97;

/// A small core: 2 tokens a block.
pub fn small() -> CoreConfig {
    CoreConfig {
        block_size: 2,
        num_blocks: 32,
        max_model_len: 40,
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_num_output_rows: 16,
        vocab_size: VOCAB,
        ..CoreConfig::default()
    }
}

/// A request of `prompt` for `max_tokens`, without stop tokens.
pub fn request(id: u64, prompt: &[u32], max_tokens: u32) -> Request {
    Request::new(RequestId(id), prompt.to_vec(), max_tokens)
}

/// The token that follows `tokens`.
pub fn next_token(tokens: &[u32]) -> u32 {
    tokens.iter().fold(tokens.len() as u32, |sum, token| (sum * 31 + token) % VOCAB)
}

/// What `request` must generate.
pub fn expected(request: &Request) -> Vec<u32> {
    let mut tokens = request.prompt.clone();
    for _ in 0..request.max_tokens {
        tokens.push(next_token(&tokens));
    }
    tokens[request.prompt.len()..].to_vec()
}

/// What came out of one sequence.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ended {
    pub tokens: Vec<u32>,
    pub reason: u8,
    pub stop_token: i32,
    pub num_cached_tokens: u32,
    pub num_output_tokens: u32,
}

pub struct Driver {
    pub core: Core,
    pub inbox: Inbox,
    pub arena: Vec<i32>,
    pub now: u64,
    pub sizes: PlanSizes,
    pub results: BTreeMap<(u64, u32), Ended>,
    tokens_of: BTreeMap<i32, Vec<u32>>,
    planned: std::collections::VecDeque<(StepId, Vec<i32>, Vec<i32>)>,
}

impl Driver {
    pub fn new(config: CoreConfig) -> Self {
        Self::over(Core::new(config).expect("the configuration is good"))
    }

    pub fn over(core: Core) -> Self {
        Self {
            inbox: core.inbox(),
            arena: vec![0; core.layout().words],
            core,
            now: 0,
            sizes: PlanSizes::default(),
            results: BTreeMap::new(),
            tokens_of: BTreeMap::new(),
            planned: std::collections::VecDeque::new(),
        }
    }

    pub fn submit(&self, request: Request) {
        self.inbox.submit(request).expect("the request is good");
    }

    /// Plan, and run the fake model over the plan.
    pub fn plan(&mut self) -> PlanSizes {
        self.now += 1_000_000;
        self.sizes = self.core.plan(self.now, &mut self.arena).expect("a step can be planned");
        self.core.check();
        if self.sizes.is_step() {
            self.run();
        }
        self.sizes
    }

    fn run(&mut self) {
        let view = PlanView::new(self.core.layout(), &self.arena);
        for event in view.slot_events().filter(|event| event.assigned) {
            let tokens = event.tokens.iter().map(|&token| token as u32).collect();
            self.tokens_of.insert(event.slot, tokens);
        }
        let (mut counts, mut tokens) = (Vec::new(), Vec::new());
        for (&slot, &kind) in view.out_slots().iter().zip(view.out_kinds()) {
            if kind == 0 {
                let history = self.tokens_of.get_mut(&slot).expect("the slot was assigned");
                let token = next_token(history);
                history.push(token);
                counts.push(1);
                tokens.push(token as i32);
            } else {
                counts.push(0);
                tokens.push(0);
            }
        }
        self.planned.push_back((self.sizes.step, counts, tokens));
    }

    /// The results that the next commit will give, to be changed by a test.
    pub fn pending(&mut self) -> &mut (StepId, Vec<i32>, Vec<i32>) {
        self.planned.front_mut().expect("a step is in flight")
    }

    /// Commit the oldest step.
    pub fn commit(&mut self) {
        let (step, counts, tokens) = self.planned.pop_front().expect("a step is in flight");
        self.now += 1_000_000;
        let results = Results { counts: &counts, tokens: &tokens };
        self.core.commit(step, self.now, results).expect("the results fit");
        self.core.check();
        self.collect();
    }

    /// Fail the oldest step.
    pub fn fail(&mut self) {
        let (step, ..) = self.planned.pop_front().expect("a step is in flight");
        self.planned.clear();
        self.now += 1_000_000;
        self.core.fail(step, self.now).expect("it is the oldest");
        self.core.check();
        self.collect();
    }

    pub fn collect(&mut self) {
        let mut outputs = StepOutputs::default();
        self.core.take_outputs(&mut outputs);
        for entry in 0..outputs.len() {
            let key = (outputs.request_ids[entry], outputs.seq_indices[entry]);
            let ended = self.results.entry(key).or_default();
            assert_eq!(ended.reason, 0, "{key:?} speaks after its end");
            let range = outputs.token_indptr[entry]..outputs.token_indptr[entry + 1];
            let new = &outputs.tokens[range.start as usize..range.end as usize];
            ended.tokens.extend(new.iter().map(|&token| token as u32));
            ended.reason = outputs.finish_reasons[entry];
            ended.stop_token = outputs.stop_tokens[entry];
            ended.num_cached_tokens = outputs.num_cached_tokens[entry];
            ended.num_output_tokens = outputs.num_output_tokens[entry];
        }
    }

    /// One step at a time; false: there was nothing to run.
    pub fn step(&mut self) -> bool {
        let ran = self.plan().is_step();
        if ran {
            self.commit();
        } else {
            self.collect();
        }
        ran
    }

    /// Until nothing is left, in at most `steps`.
    pub fn run_to_end(&mut self, steps: usize) {
        for _ in 0..steps {
            if !self.core.has_work() {
                break;
            }
            self.step();
        }
        assert!(!self.core.has_work(), "work is left after {steps} steps");
        let stats = self.core.stats();
        assert_eq!(stats.free + stats.cached, stats.capacity, "idle: {stats:?}");
        assert_eq!((stats.num_running, stats.num_waiting, stats.num_queued_tokens), (0, 0, 0));
    }

    pub fn ended(&self, id: u64) -> &Ended {
        &self.results[&(id, 0)]
    }

    pub fn assert_exact(&self, request: &Request) {
        for index in 0..request.num_sequences {
            let ended = &self.results[&(request.id.0, index)];
            assert_eq!(ended.tokens, expected(request), "{:?}.{index}", request.id);
            assert_eq!(ended.reason, FinishReason::Length as u8);
        }
    }

    pub fn view(&self) -> PlanView<'_> {
        PlanView::new(self.core.layout(), &self.arena)
    }
}
