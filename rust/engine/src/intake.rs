//! What the inbox holds becomes state: submissions queue, aborts and finishes end sequences.

use fastserve_base::fault::{Fault, planted};
use fastserve_base::{FinishReason, Nanos, RequestId, RowSlot, SeqId};
use fastserve_sched::{Candidate, OrderKey, RequestState, Sequence, Status};

use crate::core::Core;
use crate::inbox::{Command, Retired, Submission};
use crate::outputs::{Entry, EventKind};

impl Core {
    /// Take over the inbox.
    pub(crate) fn intake(&mut self, now: Nanos) {
        self.last_now = now;
        let mut commands = std::mem::take(&mut self.commands);
        {
            let mut state = self.shared.state();
            if state.commands.is_empty() {
                self.commands = commands;
                return;
            }
            std::mem::swap(&mut state.commands, &mut commands);
            state.num_new_requests = 0;
            state.num_new_tokens = 0;
        }
        for command in commands.drain(..) {
            match command {
                Command::Submit(submission) => self.enqueue(*submission, now),
                Command::Abort(id) => self.abort_now(id),
                Command::Finish { seq, reason, num_tokens_kept } => {
                    self.finish_now(seq, reason, num_tokens_kept);
                }
            }
        }
        self.commands = commands;
    }

    fn enqueue(&mut self, submission: Submission, now: Nanos) {
        let Submission { request, num_prompt_tokens, tokens, spare_tokens } = submission;
        let id = request.id;
        let candidate = Candidate {
            request: id,
            priority: request.priority,
            num_prompt_tokens,
            max_tokens: request.max_tokens,
            arrival: request.arrival,
        };
        let rank = self.policy.rank(&candidate);
        let order = self.next_order;
        self.next_order += 1;
        let num_live = request.num_sequences;
        let place = self.requests.insert(RequestState {
            request,
            num_prompt_tokens,
            order,
            rank,
            queued_at: now,
            num_live,
            num_spawned: 0,
            first_sequence: None,
            was_admitted: false,
            spare_tokens,
        });
        self.ids.insert(id, place);
        self.num_queued_requests += 1;
        self.num_queued_tokens += u64::from(num_prompt_tokens);
        let ahead = self.waiting.len() as u32;
        let sequence = self.spawn(place, tokens);
        self.wait(sequence);
        self.note(SeqId { request: id, index: 0 }, EventKind::Queued { ahead });
    }

    /// Make the next sequence of a request. It neither waits nor runs yet.
    pub(crate) fn spawn(&mut self, request: u32, tokens: Vec<u32>) -> u32 {
        let state = &mut self.requests[request];
        let index = state.num_spawned;
        state.num_spawned += 1;
        let sequence = self.sequences.insert(Sequence {
            id: SeqId { request: state.request.id, index },
            request,
            next_sibling: state.first_sequence,
            tokens,
            num_prompt_tokens: state.num_prompt_tokens,
            status: Status::Waiting,
            key: OrderKey::new(state.rank, state.order, index),
            high_water: 0,
            preempted_at: None,
            num_failures: 0,
            num_cached_tokens: None,
            follows: false,
        });
        state.first_sequence = Some(sequence);
        sequence
    }

    /// Put a sequence into the queue.
    pub(crate) fn wait(&mut self, sequence: u32) {
        let state = &mut self.sequences[sequence];
        state.status = Status::Waiting;
        let since = self.requests[state.request].queued_at;
        self.waiting.push(state.key, since, sequence);
    }

    /// End every sequence of a request, whatever each is doing. Unknown ids are ignored.
    pub(crate) fn abort_now(&mut self, id: RequestId) {
        let Some(&place) = self.ids.get(&id) else {
            return;
        };
        let state = &mut self.requests[place];
        let unspawned = state.num_spawned..state.request.num_sequences;
        state.num_spawned = unspawned.end;
        let mut next = state.first_sequence;
        for index in unspawned {
            self.end_unspawned(place, SeqId { request: id, index });
        }
        while let Some(sequence) = next {
            next = self.sequences[sequence].next_sibling;
            self.end(sequence, Ending::now(FinishReason::Abort));
        }
    }

    /// End one sequence on behalf of the text side.
    fn finish_now(&mut self, seq: SeqId, reason: FinishReason, num_tokens_kept: u32) {
        let Some(&place) = self.ids.get(&seq.request) else {
            return;
        };
        // One that was to fork later comes to be on its own, and ends.
        while self.requests[place].num_spawned <= seq.index {
            let sibling = self.spawn_sibling(place);
            self.wait(sibling);
        }
        let mut next = self.requests[place].first_sequence;
        while let Some(sequence) = next {
            let state = &self.sequences[sequence];
            if state.id == seq {
                let generated = self.num_output_tokens(sequence);
                let kept = Some(num_tokens_kept.min(generated));
                self.end(sequence, Ending { num_tokens_kept: kept, ..Ending::now(reason) });
                return;
            }
            next = state.next_sibling;
        }
    }

    /// Tokens that a sequence has generated, those in a row's tail included.
    fn num_output_tokens(&self, sequence: u32) -> u32 {
        let state = &self.sequences[sequence];
        match state.status {
            Status::Waiting => state.num_output_tokens(),
            Status::Running(slot) | Status::Settling(slot) => {
                self.rows[slot.index()].num_known - state.num_prompt_tokens
            }
        }
    }

    /// A sequence of a request that ends before it came to be.
    fn end_unspawned(&mut self, request: u32, seq: SeqId) {
        self.emit_entry(&Entry {
            seq,
            source_row: -1,
            token: None,
            finish: Some(FinishReason::Abort),
            stop_token: None,
            num_cached_tokens: 0,
            num_output_tokens: 0,
        });
        self.count_end(FinishReason::Abort);
        self.drop_one(request);
    }

    /// End a sequence: out of the queue or off its row, one entry among the outputs.
    pub(crate) fn end(&mut self, sequence: u32, ending: Ending) {
        let num_output_tokens =
            ending.num_tokens_kept.unwrap_or_else(|| self.num_output_tokens(sequence));
        let state = &self.sequences[sequence];
        let (id, request) = (state.id, state.request);
        let num_cached_tokens = state.num_cached_tokens.unwrap_or(0);
        match state.status {
            Status::Waiting => {
                self.waiting.remove(sequence);
                let state = &self.requests[request];
                let is_last = !state.was_admitted && state.num_live == 1;
                if is_last && !planted(Fault::AbortWaitingLeaks) {
                    self.num_queued_requests -= 1;
                    self.num_queued_tokens -= u64::from(state.num_prompt_tokens);
                }
            }
            Status::Running(slot) => self.leave(slot),
            Status::Settling(_) => {}
        }
        if let Status::Running(slot) | Status::Settling(slot) = self.sequences[sequence].status {
            self.rows[slot.index()].sequence = u32::MAX;
        }
        self.emit_entry(&Entry {
            seq: id,
            source_row: ending.source_row,
            token: ending.token,
            finish: Some(ending.reason),
            stop_token: ending.stop_token,
            num_cached_tokens,
            num_output_tokens,
        });
        self.count_end(ending.reason);
        self.note(id, EventKind::Finished { reason: ending.reason });
        self.unlink(request, sequence);
        let ended = self.sequences.remove(sequence);
        // The step path frees nothing large: the next submitter does.
        self.retired.push(Retired::Tokens(ended.tokens));
        self.succeed(request);
        self.drop_one(request);
    }

    /// A sequence that ends before it could fork leaves the rest of its request to the next one.
    fn succeed(&mut self, request: u32) {
        let state = &self.requests[request];
        if state.first_sequence.is_none() && state.num_spawned < state.request.num_sequences {
            let next = self.spawn_sibling(request);
            self.wait(next);
        }
    }

    /// Make the next sequence of a request that has several, at the end of its prompt.
    pub(crate) fn spawn_sibling(&mut self, request: u32) -> u32 {
        let state = &mut self.requests[request];
        let mut tokens = state.spare_tokens.pop().expect("a vector was reserved for each sequence");
        tokens.extend_from_slice(&state.request.prompt);
        self.spawn(request, tokens)
    }

    fn unlink(&mut self, request: u32, sequence: u32) {
        let after = self.sequences[sequence].next_sibling;
        let state = &mut self.requests[request];
        if state.first_sequence == Some(sequence) {
            state.first_sequence = after;
            return;
        }
        let mut at = state.first_sequence;
        while let Some(sibling) = at {
            let link = &mut self.sequences[sibling].next_sibling;
            if *link == Some(sequence) {
                *link = after;
                return;
            }
            at = *link;
        }
        unreachable!("sequence {sequence} is not among its request's");
    }

    /// One sequence less; the last takes the request with it.
    fn drop_one(&mut self, request: u32) {
        let state = &mut self.requests[request];
        state.num_live -= 1;
        if state.num_live > 0 {
            return;
        }
        let state = self.requests.remove(request);
        let id = state.request.id;
        self.ids.remove(&id);
        self.ended.push(id);
        self.retired.push(Retired::Request(state.request));
    }

    fn count_end(&mut self, reason: FinishReason) {
        self.num_endings += 1;
        let counter = match reason {
            FinishReason::Stop => &mut self.stats.num_finished_stop,
            FinishReason::Length => &mut self.stats.num_finished_length,
            FinishReason::Abort => &mut self.stats.num_finished_abort,
            FinishReason::Error => &mut self.stats.num_finished_error,
        };
        *counter += 1;
    }

    /// Take a running row out of service. Its blocks go back when the last step that names it has
    /// committed: [`settle_leaving`](Self::settle_leaving).
    pub(crate) fn leave(&mut self, slot: RowSlot) {
        self.drop_claim(slot);
        self.rows[slot.index()].flags |= fastserve_sched::rows::flags::LEAVING;
        self.leaving.push(slot);
    }
}

/// How a sequence ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ending {
    pub(crate) reason: FinishReason,
    pub(crate) source_row: i32,
    pub(crate) token: Option<u32>,
    pub(crate) stop_token: Option<u32>,
    pub(crate) num_tokens_kept: Option<u32>,
}

impl Ending {
    /// Without a last token.
    pub(crate) fn now(reason: FinishReason) -> Self {
        Self { reason, source_row: -1, token: None, stop_token: None, num_tokens_kept: None }
    }
}
