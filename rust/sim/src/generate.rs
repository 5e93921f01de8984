//! A seed becomes a configuration, a workload and rates of bad luck.
//!
//! Sizes are small on purpose: pools of a few blocks, vocabularies of a few tokens, budgets of a few
//! rows. There every limit binds and every prefix meets another.

use fastserve_base::{CoreConfig, Namespace, PolicyKind, Request, RequestId, Span, Token};

use crate::chaos::{Rates, Scenario};
use crate::ledger::Ledger;
use crate::policy::PolicyChoice;
use crate::rng::Rng;

/// The scenario of a seed.
pub fn scenario(seed: u64, steps_in_flight: u32) -> Scenario {
    let rng = Rng::new(seed);
    let mut config = config(&mut rng.stream(1));
    config.max_num_steps_in_flight = steps_in_flight;
    weigh_prompts(&mut config, &mut rng.stream(5));
    let mut rng = rng.stream(2);
    let policy = if rng.chance(25) {
        PolicyChoice::Random { seed: rng.bits() }
    } else {
        PolicyChoice::Config
    };
    let num_requests = if rng.chance(20) { rng.range(150..300) } else { rng.range(10..150) };
    Scenario { seed, config, policy, rates: rates(&mut rng), num_requests, self_checks: true }
}

fn config(rng: &mut Rng) -> CoreConfig {
    let block_size = rng.pick(&[1, 2, 4, 4, 8, 16]);
    let num_blocks = match rng.below(4) {
        0 => rng.range(2..9),
        1 | 2 => rng.range(8..40),
        _ => rng.range(40..160),
    };
    let max_model_len = rng.range(4..(num_blocks * block_size).clamp(5, 160) + 20);
    let max_num_batched_tokens = rng.pick(&[1, 3, 7, 16, 33, 64, 200]);
    let max_num_seqs = if rng.chance(15) { rng.range(12..40) } else { rng.range(1..13) };
    CoreConfig {
        block_size,
        num_blocks,
        max_model_len,
        max_num_seqs,
        max_num_batched_tokens,
        max_chunk_tokens: rng.chance(40).then(|| rng.range(1..17)),
        long_prefill_threshold: rng.chance(40).then(|| rng.range(2..32)),
        max_long_prefill_percent: rng.pick(&[1, 10, 30, 50, 100]),
        max_num_output_rows: max_num_seqs + rng.pick(&[0, 0, 1, 4, 30]),
        enable_prefix_caching: !rng.chance(15),
        scheduling_policy: rng.pick(&[PolicyKind::Fcfs, PolicyKind::Priority]),
        max_wait: rng.pick(&[None, Some(200), Some(2_000), Some(20_000)]),
        watermark_blocks: if rng.chance(30) { rng.range(0..3).min(num_blocks - 1) } else { 0 },
        vocab_size: rng.pick(&[2, 3, 5, 16, 300]),
        max_num_queued_requests: rng.pick(&[3, 16, 64, 256]),
        max_num_queued_tokens: rng.pick(&[100, 1_000, 100_000, 100_000]),
        max_num_sequences_per_request: 8,
        max_sampling_words: 8,
        max_num_step_failures: rng.range(0..4),
        max_num_tickets: rng.pick(&[0, 1, 3, 8]),
        hash_seed: rng.bits(),
        num_step_records: 64,
        num_timeline_events: 1 << 15,
        enable_block_events: rng.chance(40),
        ..CoreConfig::default()
    }
}

/// Limits on the work of prompts, in some of the scenarios.
fn weigh_prompts(config: &mut CoreConfig, rng: &mut Rng) {
    if rng.chance(30) {
        config.max_num_mixed_prefill_tokens = Some(rng.pick(&[1, 2, 5, 16, 1_000]));
    }
    if rng.chance(30) {
        config.context_per_token = Some(rng.pick(&[1, 3, 10, 50, 1 << 24]));
    }
}

fn rates(rng: &mut Rng) -> Rates {
    let mut rate = |quiet: u32, most: u32| {
        if rng.chance(quiet) { 0 } else { rng.range(1..most + 1) }
    };
    Rates {
        arrive: rate(0, 60) + 20,
        burst: rate(20, 20) + 1,
        abort: rate(40, 12),
        cut: rate(60, 8),
        fail: rate(60, 6),
        error_row: rate(70, 3),
        reset: rate(70, 4),
        pause: rate(75, 4),
        misuse: rate(50, 10),
        bad_request: rate(50, 15),
        again: rate(30, 50),
        commit_late: rate(30, 80),
        transfer: rate(50, 20),
        drain: rate(85, 1),
        close: rate(92, 1),
    }
}

/// Makes requests whose prefixes meet.
#[derive(Debug, Clone)]
pub struct Workload {
    rng: Rng,
    documents: Vec<Document>,
    forks: u32,
    scores: u32,
    namespaces: u32,
    max_output: u32,
}

#[derive(Debug, Clone)]
struct Document {
    tokens: Vec<Token>,
    spans: Vec<Span>,
}

const NAMESPACES: [u128; 4] = [0, 1, 1 << 64, (1 << 64) | 1];

impl Workload {
    /// The workload of a seed.
    pub fn new(seed: u64, config: &CoreConfig) -> Self {
        let mut rng = Rng::new(seed).stream(3);
        let num_documents = rng.range(1..6);
        let with_spans = rng.chance(40);
        let mut documents: Vec<Document> = (0..num_documents)
            .map(|_| {
                let tokens = random_tokens(&mut rng, config.max_model_len, config.vocab_size);
                let spans = if with_spans { random_spans(&mut rng, &tokens) } else { Vec::new() };
                Document { tokens, spans }
            })
            .collect();
        if with_spans {
            // The same tokens under other pictures.
            let mut twin = documents[0].clone();
            twin.spans = random_spans(&mut rng, &twin.tokens);
            documents.push(twin);
        }
        Self {
            documents,
            forks: if rng.chance(50) { rng.range(1..40) } else { 0 },
            scores: if rng.chance(30) { rng.range(1..30) } else { 0 },
            namespaces: if rng.chance(40) { rng.range(2..5) } else { 1 },
            max_output: rng.pick(&[3, 12, 40, 100]),
            rng,
        }
    }

    /// The next request.
    pub fn request(&mut self, id: u64, config: &CoreConfig, now: u64) -> Request {
        let rng = &mut self.rng;
        let document = &self.documents[rng.below(self.documents.len() as u64) as usize];
        let len = prompt_len(rng, config).min(document.tokens.len());
        // Either a prefix of the document, or one that leaves it somewhere.
        let common = if rng.chance(50) { len } else { rng.range(0..len as u32 + 1) as usize };
        let mut prompt = document.tokens[..common].to_vec();
        prompt.extend(random_tokens(rng, (len - common) as u32, config.vocab_size));
        let max_tokens = rng.range(1..self.max_output + 1);
        let mut request = Request::new(RequestId(id), prompt, max_tokens);
        request.spans =
            document.spans.iter().filter(|span| (span.end as usize) <= common).copied().collect();
        if rng.chance(self.forks) {
            request.num_sequences = rng.range(2..5);
        }
        request.score_prompt = rng.chance(self.scores);
        request.priority = rng.range(0..5) as i32 - 2;
        request.namespace = Namespace(NAMESPACES[rng.below(u64::from(self.namespaces)) as usize]);
        request.adapter = request.namespace.0 as u32;
        if rng.chance(30) {
            let words = rng.range(1..4);
            request.sampling = (0..words).map(|_| rng.range(0..3) as i32).collect();
        }
        if rng.chance(50) {
            let stops = rng.range(1..3);
            request.stop_token_ids = random_tokens(rng, stops, config.vocab_size);
            request.min_tokens = rng.range(0..max_tokens.min(5) + 1);
        }
        request.arrival = now;
        request
    }

    /// A request that goes on from what another had: the next turn of a conversation.
    pub fn next_turn(&mut self, mut request: Request, ledger: &Ledger, longest: usize) -> Request {
        if ledger.seqs.is_empty() {
            return request;
        }
        let seq = &ledger.seqs[self.rng.below(ledger.seqs.len() as u64) as usize];
        let before = &ledger.requests[seq.request].request;
        let len = self.rng.range(1..seq.num_known as u32 + 1) as usize;
        let suffix = self.rng.range(0..3) as usize;
        let tail = request.prompt.len().saturating_sub(suffix);
        let mut prompt = seq.stream.tokens[..len].to_vec();
        prompt.extend_from_slice(&request.prompt[tail..]);
        prompt.truncate(longest.max(1));
        request.spans.clone_from(&before.spans);
        request.spans.retain(|span| span.end as usize <= prompt.len().min(len));
        request.namespace = before.namespace;
        request.adapter = before.adapter;
        request.prompt = prompt;
        request
    }

    /// A request that must be refused.
    pub fn bad_request(&mut self, mut request: Request, config: &CoreConfig) -> Request {
        let prompt = request.prompt.len() as u32;
        match self.rng.below(10) {
            0 => request.prompt.clear(),
            1 => request.prompt[0] = config.vocab_size,
            2 => request.prompt = vec![0; config.max_model_len as usize],
            3 => request.max_tokens = 0,
            4 => request.num_sequences = 0,
            5 => request.num_sequences = config.max_num_sequences_per_request + 1,
            6 => request.min_tokens = request.max_tokens + 1,
            7 => request.sampling = vec![1; config.max_sampling_words as usize + 1],
            8 => request.stop_token_ids = vec![config.vocab_size + 7],
            _ => request.spans = vec![Span { start: prompt, end: prompt + 1, digest: 1 }],
        }
        request
    }
}

/// Lengths around multiples of the block, mostly.
fn prompt_len(rng: &mut Rng, config: &CoreConfig) -> usize {
    let most = config.max_model_len - 1;
    let len = if rng.chance(60) {
        let blocks = rng.range(1..most / config.block_size + 2);
        (blocks * config.block_size + rng.range(0..3)).saturating_sub(1)
    } else {
        rng.range(1..most.min(40) + 1)
    };
    len.clamp(1, most.max(1)) as usize
}

fn random_tokens(rng: &mut Rng, len: u32, vocab_size: u32) -> Vec<Token> {
    (0..len).map(|_| rng.range(0..vocab_size)).collect()
}

fn random_spans(rng: &mut Rng, tokens: &[Token]) -> Vec<Span> {
    let mut spans = Vec::new();
    let mut start = rng.range(0..6);
    while spans.len() < 3 {
        let end = start + rng.range(1..6);
        if end as usize > tokens.len() {
            break;
        }
        spans.push(Span { start, end, digest: u128::from(rng.below(2)) << 100 });
        start = end + rng.range(0..5);
    }
    spans
}
