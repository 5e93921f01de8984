//! The door: any thread submits, aborts and reads here, and none of them waits for a step.
//!
//! A submission is checked against limits that never change and against the set of ids in use, and is
//! refused at once if it cannot be served. What is accepted lies in a queue that the next `plan`
//! takes over whole. The lock is held for a few stores, never while a step is planned.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Waker;

use fastserve_base::{
    CoreConfig, FinishReason, Nanos, Request, RequestError, RequestId, SeqId, StepId, Token,
};
use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

use crate::outputs::{Lifecycle, Stats, StepRecord, TimelineEvent};
use crate::timeline::Timeline;

/// A request on its way to the core, with every vector it will ever need.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) request: Request,
    pub(crate) num_prompt_tokens: u32,
    /// Tokens of the first sequence: the prompt, with room for the output.
    pub(crate) tokens: Vec<Token>,
    /// The same room, empty, for the other sequences.
    pub(crate) spare_tokens: Vec<Vec<Token>>,
}

/// What the core finds in the queue, in order.
#[derive(Debug)]
pub(crate) enum Command {
    Submit(Box<Submission>),
    Abort(RequestId),
    Finish { seq: SeqId, reason: FinishReason, num_tokens_kept: u32 },
}

/// What the core and its inboxes share.
#[derive(Debug)]
pub(crate) struct Shared {
    config: CoreConfig,
    lowered_by_pool: bool,
    state: Mutex<State>,
    timeline: Mutex<Timeline>,
    waker: OnceLock<Waker>,
}

/// Behind the lock.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) commands: Vec<Command>,
    /// Live requests, and how many sequences each has.
    pub(crate) ids: HashMap<RequestId, u32, FxBuildHasher>,
    pub(crate) lifecycle: Lifecycle,
    /// As of the last plan or commit.
    pub(crate) stats: Stats,
    /// Never admitted, in the core's queue, as of the last plan.
    pub(crate) num_queued_requests: usize,
    /// In `commands`.
    pub(crate) num_new_requests: usize,
    pub(crate) num_new_tokens: u64,
    pub(crate) rate: Rate,
    /// What ended, for the next submitter to free.
    pub(crate) retired: Vec<Retired>,
}

/// Memory of what ended, on its way to being freed.
#[derive(Debug)]
#[expect(dead_code, reason = "held only to be dropped by another thread")]
pub(crate) enum Retired {
    Request(Request),
    Tokens(Vec<Token>),
}

/// Tokens a nanosecond, over about the last eight steps.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Rate {
    tokens: u64,
    nanos: u64,
}

impl Rate {
    pub(crate) fn observe(&mut self, tokens: u64, nanos: Nanos) {
        self.tokens = self.tokens - self.tokens / 8 + tokens;
        self.nanos = self.nanos - self.nanos / 8 + nanos;
    }

    /// How long `tokens` take; a second where nothing was observed yet.
    fn time_for(&self, tokens: u64) -> Nanos {
        if self.tokens == 0 {
            return 1_000_000_000;
        }
        let nanos = u128::from(tokens) * u128::from(self.nanos) / u128::from(self.tokens);
        nanos.min(u128::from(u64::MAX)) as Nanos
    }
}

impl Shared {
    pub(crate) fn new(config: &CoreConfig, lowered_by_pool: bool) -> Self {
        let queued = config.max_num_queued_requests as usize;
        let live = queued + config.max_num_seqs as usize;
        Self {
            config: config.clone(),
            lowered_by_pool,
            state: Mutex::new(State {
                commands: Vec::with_capacity(queued + live),
                ids: HashMap::with_capacity_and_hasher(2 * live, FxBuildHasher),
                lifecycle: Lifecycle::Running,
                stats: Stats::default(),
                num_queued_requests: 0,
                num_new_requests: 0,
                num_new_tokens: 0,
                rate: Rate::default(),
                retired: Vec::with_capacity(live),
            }),
            timeline: Mutex::new(Timeline::new(
                config.num_timeline_events as usize,
                config.num_step_records as usize,
            )),
            waker: OnceLock::new(),
        }
    }

    /// Tell whoever steps that a plan may find more than the last one did. Not under a lock of ours.
    pub(crate) fn wake(&self) {
        if let Some(waker) = self.waker.get() {
            waker.wake_by_ref();
        }
    }

    /// A thread that panicked while it held the lock left whole values behind: every change under
    /// it is a few stores.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hand over the batches unless somebody reads just now; then they wait for the next time.
    pub(crate) fn absorb(&self, events: &mut Vec<TimelineEvent>, steps: &mut Vec<StepRecord>) {
        if let Ok(mut timeline) = self.timeline.try_lock() {
            timeline.absorb(events, steps);
        }
    }

    pub(crate) fn timeline_of(&self, request: RequestId) -> Vec<TimelineEvent> {
        self.timeline.lock().unwrap_or_else(PoisonError::into_inner).of(request)
    }

    pub(crate) fn steps_since(&self, from: StepId) -> Vec<StepRecord> {
        self.timeline.lock().unwrap_or_else(PoisonError::into_inner).steps_since(from)
    }
}

/// A handle for submitting, aborting and reading. Clones lead to the same core.
#[derive(Debug, Clone)]
pub struct Inbox {
    shared: Arc<Shared>,
}

impl Inbox {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Check `request` and queue it for the next plan.
    ///
    /// # Errors
    ///
    /// [`RequestError`] if it cannot be served, now or ever; then nothing was queued.
    pub fn submit(&self, request: Request) -> Result<(), RequestError> {
        validate(&self.shared.config, self.shared.lowered_by_pool, &request)?;
        let submission = Box::new(Submission::new(request, self.shared.config.max_model_len));
        let id = submission.request.id;
        let num_sequences = submission.request.num_sequences;
        let num_tokens = submission.tokens.len() as u64;

        let mut state = self.shared.state();
        state.admit(&self.shared.config, id, num_tokens)?;
        state.num_new_requests += 1;
        state.num_new_tokens += num_tokens;
        state.ids.insert(id, num_sequences);
        state.commands.push(Command::Submit(submission));
        let retired = if state.retired.is_empty() {
            Vec::new()
        } else {
            let room = state.retired.capacity();
            std::mem::replace(&mut state.retired, Vec::with_capacity(room))
        };
        drop(state);
        drop(retired);
        self.shared.wake();
        Ok(())
    }

    /// End every sequence of a request with `abort`, at the next plan. Idempotent; false: no such
    /// request is live.
    pub fn abort(&self, id: RequestId) -> bool {
        let mut state = self.shared.state();
        let live = state.ids.contains_key(&id);
        if live {
            state.commands.push(Command::Abort(id));
            drop(state);
            self.shared.wake();
        }
        live
    }

    /// End one sequence on behalf of the text side (a stop string), at the next plan.
    ///
    /// `num_tokens_kept` is how many of its output tokens count. False: no such sequence is live. A
    /// sequence that ended by itself in the meantime keeps its own reason.
    pub fn finish(&self, seq: SeqId, reason: FinishReason, num_tokens_kept: u32) -> bool {
        let mut state = self.shared.state();
        let live = state.ids.get(&seq.request).is_some_and(|&count| seq.index < count);
        if live {
            state.commands.push(Command::Finish { seq, reason, num_tokens_kept });
            drop(state);
            self.shared.wake();
        }
        live
    }

    /// Whether the request has not ended.
    pub fn is_live(&self, id: RequestId) -> bool {
        self.shared.state().ids.contains_key(&id)
    }

    /// Counters and gauges as of the last plan or commit; the queue as of now.
    pub fn stats(&self) -> Stats {
        let shared = self.shared.state();
        let mut stats = shared.stats;
        stats.num_waiting += shared.num_new_requests as u64;
        stats.num_queued_tokens += shared.num_new_tokens;
        stats
    }

    /// How long a request submitted now would wait for those ahead of it, at the present rate.
    pub fn predicted_wait(&self) -> Nanos {
        let state = self.shared.state();
        state.rate.time_for(state.stats.num_queued_tokens + state.num_new_tokens)
    }

    /// What happened to a request, as far as the ring reaches, oldest first.
    pub fn timeline(&self, id: RequestId) -> Vec<TimelineEvent> {
        self.shared.timeline_of(id)
    }

    /// Steps `from` and later, as far as the ring reaches, oldest first.
    pub fn steps_since(&self, from: StepId) -> Vec<StepRecord> {
        self.shared.steps_since(from)
    }

    /// Where the core stands.
    pub fn state(&self) -> Lifecycle {
        self.shared.state().lifecycle
    }

    /// Have `waker` called whenever a plan may find more than the last one did: after a submission, an
    /// abort or a finish, and when the core is paused, resumed, drained or closed.
    ///
    /// For a thread that steps and sleeps while there is nothing to do. It is called in whatever thread
    /// did it, which may hold the core. False: a waker was set before, and stays.
    pub fn set_waker(&self, waker: Waker) -> bool {
        self.shared.waker.set(waker).is_ok()
    }

    /// Whether anything lies in the inbox for the next plan.
    pub fn has_commands(&self) -> bool {
        !self.shared.state().commands.is_empty()
    }
}

impl State {
    /// The checks that depend on what is live. `num_tokens` is the prompt.
    fn admit(
        &self,
        config: &CoreConfig,
        id: RequestId,
        num_tokens: u64,
    ) -> Result<(), RequestError> {
        if matches!(self.lifecycle, Lifecycle::Draining | Lifecycle::Closed) {
            return Err(RequestError::NotAccepting { state: self.lifecycle.name() });
        }
        if self.ids.contains_key(&id) {
            return Err(RequestError::DuplicateRequest { id });
        }
        let queued_tokens = self.stats.num_queued_tokens + self.num_new_tokens;
        let retry_after = self.rate.time_for(queued_tokens);
        let limit = config.max_num_queued_requests as usize;
        if self.num_queued_requests + self.num_new_requests >= limit {
            return Err(RequestError::QueueFull { limit, retry_after });
        }
        if queued_tokens > 0 && queued_tokens + num_tokens > config.max_num_queued_tokens {
            return Err(RequestError::QueueTokensFull {
                queued: queued_tokens as usize,
                prompt: num_tokens as usize,
                limit: config.max_num_queued_tokens as usize,
                retry_after,
            });
        }
        Ok(())
    }
}

impl Submission {
    fn new(mut request: Request, max_model_len: u32) -> Self {
        let num_prompt_tokens = request.prompt.len() as u32;
        let room = request.max_tokens.min(max_model_len - num_prompt_tokens) as usize;
        let total = request.prompt.len() + room;
        let spare_tokens = (1..request.num_sequences).map(|_| Vec::with_capacity(total)).collect();
        let mut tokens = if request.num_sequences == 1 {
            std::mem::take(&mut request.prompt)
        } else {
            request.prompt.clone()
        };
        tokens.reserve_exact(room);
        Self { request, num_prompt_tokens, tokens, spare_tokens }
    }
}

/// The checks that depend on the request and the configuration alone.
fn validate(
    config: &CoreConfig,
    lowered_by_pool: bool,
    request: &Request,
) -> Result<(), RequestError> {
    if request.prompt.is_empty() {
        return Err(RequestError::EmptyPrompt);
    }
    in_range("max_tokens", request.max_tokens, 1, u32::MAX)?;
    in_range("num_sequences", request.num_sequences, 1, config.max_num_sequences_per_request)?;
    in_range("min_tokens", request.min_tokens, 0, request.max_tokens)?;
    in_range("sampling words", request.sampling.len() as u32, 0, config.max_sampling_words)?;
    let vocab_size = config.vocab_size;
    for tokens in [&request.prompt, &request.stop_token_ids] {
        if let Some(position) = tokens.iter().position(|&token| token >= vocab_size) {
            return Err(RequestError::TokenOutOfRange {
                token: tokens[position],
                position,
                vocab_size,
            });
        }
    }
    let prompt = request.prompt.len();
    let max = config.max_model_len as usize;
    if prompt >= max {
        return Err(RequestError::PromptTooLong { prompt, max, lowered_by_pool });
    }
    let mut end = 0;
    for (index, span) in request.spans.iter().enumerate() {
        if span.start < end || span.start >= span.end || span.end as usize > prompt {
            let (start, end) = (span.start, span.end);
            return Err(RequestError::BadSpan { index, start, end, prompt });
        }
        end = span.end;
    }
    Ok(())
}

fn in_range(name: &'static str, value: u32, min: u32, max: u32) -> Result<(), RequestError> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    let want = if max == u32::MAX { format!("at least {min}") } else { format!("{min} to {max}") };
    Err(RequestError::OutOfRange { name, value: i64::from(value), want })
}
