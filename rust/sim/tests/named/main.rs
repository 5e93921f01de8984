//! Hand-written scenarios: what the core promises, one promise a test, with the trace that shows it.
//!
//! Each runs under every checker. A trace is part of the promise: if it changes, somebody decided so.

mod endings;
mod forks;
mod order;
mod sharing;

use fastserve_base::{CoreConfig, Request, RequestId, Token};
use fastserve_sim::{Event, PolicyChoice, Sim};

/// A pool of 32 blocks of 4 tokens; 8 rows, 64 tokens a step.
fn small() -> CoreConfig {
    CoreConfig {
        block_size: 4,
        num_blocks: 32,
        max_model_len: 64,
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_num_output_rows: 16,
        max_wait: None,
        vocab_size: 100_000,
        num_timeline_events: 1 << 12,
        ..CoreConfig::default()
    }
}

fn sim(config: CoreConfig) -> Sim {
    Sim::new(config, PolicyChoice::Config)
}

/// Tokens that no other `family` begins with.
fn tokens(family: u32, len: u32) -> Vec<Token> {
    (0..len).map(|at| family * 100 + at).collect()
}

fn request(id: u64, prompt: Vec<Token>, max_tokens: u32) -> Request {
    Request::new(RequestId(id), prompt, max_tokens)
}

/// What a test does to a simulation, with violations as panics that show the trace.
trait Drive {
    fn submit_all(&mut self, requests: impl IntoIterator<Item = Request>);
    fn plan_one(&mut self) -> bool;
    fn commit_one(&mut self);
    fn fail_one(&mut self);
    fn step(&mut self);
    fn finish_all(&mut self);
    fn must<T>(&self, check: fastserve_sim::Check<T>) -> T;
    fn events(&self, wanted: impl Fn(&Event) -> bool) -> String;
}

impl Drive for Sim {
    fn submit_all(&mut self, requests: impl IntoIterator<Item = Request>) {
        for request in requests {
            let answer = self.submit(request);
            assert_eq!(self.must(answer), None, "accepted");
        }
    }

    fn plan_one(&mut self) -> bool {
        self.now += 1;
        let check = self.plan();
        self.must(check)
    }

    fn commit_one(&mut self) {
        let check = self.commit(|_| false);
        self.must(check);
    }

    fn fail_one(&mut self) {
        let check = self.fail(0);
        self.must(check);
    }

    /// Plan and commit.
    fn step(&mut self) {
        assert!(self.plan_one(), "nothing to run");
        self.commit_one();
    }

    /// Step until everything has ended, and nothing is left behind.
    fn finish_all(&mut self) {
        let limit = self.config.max_num_steps_in_flight as usize;
        while !self.is_done() {
            if self.flights.len() == limit || !self.plan_one() {
                self.commit_one();
            }
        }
        self.must(self.check_end());
    }

    fn must<T>(&self, check: fastserve_sim::Check<T>) -> T {
        check.unwrap_or_else(|violation| panic!("{violation}\n{}", self.trace.tail(40)))
    }

    fn events(&self, wanted: impl Fn(&Event) -> bool) -> String {
        self.trace.only(wanted)
    }
}

fn is_end(event: &Event) -> bool {
    matches!(event, Event::Finish { .. })
}

fn is_row(event: &Event) -> bool {
    matches!(event, Event::Admit { .. } | Event::Extend { .. } | Event::Rematch { .. })
}
