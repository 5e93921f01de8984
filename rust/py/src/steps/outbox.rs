//! Where the thread that steps and the threads that read meet.
//!
//! The file descriptor is readable, by one byte of a pipe, exactly while there is something for a reader
//! to do: news to take, or nothing to wait for (the thread is parked, or has ended).
//!
//! # Invariants
//!
//! 1. `has_byte` says whether the byte is in the pipe: so no write finds the pipe full, and no read
//!    finds it empty.
//! 2. While the thread is parked, nothing has come for a plan since it last found nothing to do.

use std::collections::VecDeque;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Wake;

use fastserve_base::{Nanos, StepId};
use fastserve_cpu::Samples;
use fastserve_engine::StepOutputs;

/// Steps that wait for a reader before the thread stops to plan.
const MAX_NUM_UNREAD: usize = 64;

/// What one step has to say, or the time between two.
pub(super) struct News {
    /// The step, if it is one.
    pub(super) step: Option<StepId>,
    /// When, on the caller's clock.
    pub(super) at: Nanos,
    pub(super) outputs: StepOutputs,
    pub(super) samples: Samples,
    /// What failed; the step was rolled back.
    pub(super) failure: Option<String>,
}

/// How the thread ended.
#[derive(Debug, Clone)]
pub(super) enum End {
    /// It was told to.
    Stopped,
    /// The core panicked, or the loop; the core's health knows more.
    Panicked,
    /// A call failed that never should.
    Failed(String),
}

pub(super) struct Outbox {
    state: Mutex<State>,
    /// Something changed that the thread may wait for.
    changed: Condvar,
    reader: PipeReader,
    writer: PipeWriter,
}

/// What the thread does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doing {
    /// A plan has begun, and its step.
    Stepping,
    /// The same, and something came for the next plan since.
    Woken,
    /// It sleeps, for there is nothing to plan; or it was not begun.
    Parked,
}

struct State {
    news: VecDeque<News>,
    doing: Doing,
    is_stopping: bool,
    end: Option<End>,
    has_byte: bool,
}

impl Outbox {
    /// For a thread that begins parked.
    pub(super) fn new() -> std::io::Result<Self> {
        let (reader, writer) = std::io::pipe()?;
        let outbox = Self {
            state: Mutex::new(State {
                news: VecDeque::with_capacity(MAX_NUM_UNREAD + 1),
                doing: Doing::Parked,
                is_stopping: false,
                end: None,
                has_byte: false,
            }),
            changed: Condvar::new(),
            reader,
            writer,
        };
        outbox.settle(&mut outbox.lock());
        Ok(outbox)
    }

    pub(super) fn fd(&self) -> RawFd {
        self.reader.as_raw_fd()
    }

    // The thread that steps.

    /// Begin to plan, when there is room for what it will say. False: stop instead.
    pub(super) fn begin(&self) -> bool {
        let mut state = self.lock();
        while state.news.len() >= MAX_NUM_UNREAD && !state.is_stopping {
            state = self.wait(state);
        }
        state.doing = Doing::Stepping;
        self.settle(&mut state);
        !state.is_stopping
    }

    /// Sleep until something has come for a plan since the last [`Outbox::begin`].
    pub(super) fn park(&self) {
        let mut state = self.lock();
        while state.doing != Doing::Woken && !state.is_stopping {
            state.doing = Doing::Parked;
            self.settle(&mut state);
            state = self.wait(state);
        }
    }

    /// Give news to the readers.
    pub(super) fn push(&self, news: News) {
        let mut state = self.lock();
        state.news.push_back(news);
        self.settle(&mut state);
    }

    /// The thread ends.
    pub(super) fn end(&self, end: End) {
        let mut state = self.lock();
        state.end = Some(end);
        self.settle(&mut state);
    }

    // Any thread.

    /// The oldest news.
    pub(super) fn take(&self) -> Option<News> {
        let mut state = self.lock();
        let news = state.news.pop_front()?;
        self.settle(&mut state);
        self.changed.notify_one();
        Some(news)
    }

    /// How the thread ended, if it did and every news of it is taken.
    pub(super) fn end_of_all(&self) -> Option<End> {
        let state = self.lock();
        if state.news.is_empty() { state.end.clone() } else { None }
    }

    /// Whether there is news, or may be soon.
    pub(super) fn has_work(&self) -> bool {
        let state = self.lock();
        !state.news.is_empty() || (state.doing != Doing::Parked && state.end.is_none())
    }

    /// Have the thread end before its next plan.
    pub(super) fn stop(&self) {
        self.lock().is_stopping = true;
        self.changed.notify_one();
    }

    /// A thread that panicked left whole values behind: every change is a few stores.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Make the descriptor readable, or not, as the state is now.
    fn settle(&self, state: &mut State) {
        let wanted = !state.news.is_empty() || state.doing == Doing::Parked || state.end.is_some();
        if wanted != state.has_byte {
            let mut byte = [0];
            let moved = if wanted {
                (&self.writer).write_all(&byte)
            } else {
                (&self.reader).read_exact(&mut byte)
            };
            moved.expect("a pipe takes and gives one byte");
            state.has_byte = wanted;
        }
    }
}

/// What the core's inbox calls.
impl Wake for Outbox {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut state = self.lock();
        state.doing = Doing::Woken;
        self.settle(&mut state);
        self.changed.notify_one();
    }
}
