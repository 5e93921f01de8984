//! What clients and the text side do: submit, abort, cut.

use fastserve_base::{FinishReason, Request, RequestError, RequestId, SeqId};
use fastserve_engine::Lifecycle;

use super::Sim;
use crate::check::counters::queued;
use crate::ledger::Place;
use crate::trace::Event;
use crate::violation::{Check, ensure};

impl Sim {
    /// Submit a request. `Ok(None)`: accepted. A refusal must be the one that is due.
    ///
    /// # Errors
    ///
    /// A violation.
    pub fn submit(&mut self, request: Request) -> Check<Option<RequestError>> {
        let expected = self.refusal(&request);
        let id = request.id.0;
        let answer = self.inbox.submit(request.clone());
        let code = answer.as_ref().err().map(RequestError::code);
        ensure!(code == expected, "errors", "submit of r{id} answers {code:?}, want {expected:?}");
        let Err(error) = answer else {
            let (prompt, n) = (request.prompt.len() as u32, request.num_sequences);
            let max_tokens = request.max_tokens;
            self.trace.push(self.last_step, Event::Submit { request: id, prompt, max_tokens, n });
            let rank = self.policy.rank(&self.config, &request);
            let (vocab, len) = (self.config.vocab_size, self.config.max_model_len);
            self.ledger.accept(request, rank, vocab, len, self.last_step);
            self.patience.accept(&self.ledger, self.last_step);
            self.settle()?;
            return Ok(None);
        };
        self.trace.push(self.last_step, Event::Refuse { request: id, code: error.code() });
        self.settle()?;
        Ok(Some(error))
    }

    /// The refusal that is due, if one is.
    fn refusal(&self, request: &Request) -> Option<&'static str> {
        let config = &self.config;
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Some("empty_prompt");
        }
        let in_range = request.max_tokens >= 1
            && (1..=config.max_num_sequences_per_request).contains(&request.num_sequences)
            && request.min_tokens <= request.max_tokens
            && request.sampling.len() <= config.max_sampling_words as usize;
        if !in_range {
            return Some("out_of_range");
        }
        let mut ids = request.prompt.iter().chain(&request.stop_token_ids);
        if ids.any(|&token| token >= config.vocab_size) {
            return Some("token_out_of_range");
        }
        if prompt >= config.max_model_len as usize {
            return Some("context_length_exceeded");
        }
        let mut end = 0;
        for span in &request.spans {
            if span.start < end || span.start >= span.end || span.end as usize > prompt {
                return Some("bad_span");
            }
            end = span.end;
        }
        if matches!(self.core.state(), Lifecycle::Draining | Lifecycle::Closed) {
            return Some("not_accepting");
        }
        if self.ledger.live.contains_key(&request.id.0) {
            return Some("duplicate_request");
        }
        let (requests, tokens) = queued(&self.ledger, false);
        if requests >= config.max_num_queued_requests as usize {
            return Some("queue_full");
        }
        (tokens > 0 && tokens + prompt as u64 > config.max_num_queued_tokens)
            .then_some("queue_tokens_full")
    }

    /// Abort a request, live or not.
    ///
    /// # Errors
    ///
    /// A violation.
    pub fn abort(&mut self, request: u64) -> Check {
        let live = self.ledger.live.get(&request).copied();
        let answer = self.inbox.abort(RequestId(request));
        ensure!(
            answer == live.is_some(),
            "errors",
            "abort of r{request} answers {answer}, live is {}",
            live.is_some()
        );
        if let Some(number) = live {
            self.ledger.requests[number].abort_pending = true;
        }
        self.trace.push(self.last_step, Event::Abort { request });
        self.settle()
    }

    /// End a sequence as the text side does on a stop string.
    ///
    /// # Errors
    ///
    /// A violation.
    pub fn cut(&mut self, id: SeqId, kept: u32) -> Check {
        let live = self.ledger.find(id.request.0, id.index).is_some();
        let answer = self.inbox.finish(id, FinishReason::Stop, kept);
        ensure!(answer == live, "errors", "finish of {id:?} answers {answer}, live is {live}");
        if let Some(seq) = self.ledger.find(id.request.0, id.index) {
            let abort = self.ledger.record_of(seq).abort_pending;
            let state = &mut self.ledger.seqs[seq];
            if !matches!(state.place, Place::Unborn | Place::Ended(_))
                && !abort
                && state.cut.is_none()
            {
                state.cut = Some((FinishReason::Stop, kept));
            }
        }
        self.trace.push(self.last_step, Event::Cut { seq: id, kept });
        self.settle()
    }
}
