//! A fixed set of threads that share out the items of one kernel at a time.
//!
//! The caller's thread is one of them: it posts a job, works on it like the others, and returns
//! when every item is done. Items are claimed from a counter, so a thread that comes late (or never:
//! it may have lost its core to someone else) costs nothing; the caller waits only for threads that
//! have begun. Which thread computes an item never shows in the result.
//!
//! Threads of torch and of others share the cores. So a worker that finds nothing to do looks for a
//! few microseconds, enough to catch the next kernel of the same layer, and then sleeps in the
//! kernel until it is woken. Jobs too small to be worth waking anyone run on the caller alone.
//!
//! # Invariants
//!
//! 1. `State::job` is `Some` only while [`Pool::run`] is in progress, which keeps what it points to
//!    alive; a worker takes it under the lock and counts itself in `num_active` there.
//! 2. `Pool::run` returns, or unwinds, only when `job` is `None` and `num_active` is zero.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::isa::Isa;
use crate::simd::{self, Kernel};

/// Most threads a pool may have.
pub const MAX_NUM_THREADS: usize = 1024;

/// Times a worker looks for a job before it sleeps: 1 to 5 µs, by what a machine's pause takes.
const NUM_SPINS: usize = 100;

/// Times the caller looks whether the workers have left before it sleeps: 20 to 100 µs. They have
/// begun their last items, and being woken takes about as long.
const NUM_LAST_SPINS: usize = 2_000;

/// Work, in nanoseconds of one core, below which waking a thread costs more than it brings.
const SMALL_WORK_NS: usize = 15_000;

/// Threads that run kernels.
///
/// Calls from several threads take turns. Dropping the pool ends its threads. In a process forked
/// from the one that made it, the pool has the caller's thread alone and works on.
pub struct Pool {
    isa: Isa,
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    turn: Mutex<()>,
    process: u32,
}

struct Shared {
    state: Mutex<State>,
    /// Copy of `State::generation` to look at without the lock.
    generation: AtomicU64,
    /// Copy of `State::num_active` to look at without the lock.
    num_active: AtomicUsize,
    posted: Condvar,
    left: Condvar,
}

#[derive(Default)]
struct State {
    job: Option<Job>,
    generation: u64,
    num_active: usize,
    /// Workers that wait on `posted`.
    num_asleep: usize,
    /// Whether the caller waits on `left`.
    caller_waits: bool,
    is_closed: bool,
    panic: Option<Panic>,
}

/// What a panic carries.
type Panic = Box<dyn Any + Send>;

/// The closure of the call of [`Pool::run`] in progress, its lifetime erased.
type Job = &'static (dyn Fn() + Sync);

impl Pool {
    /// A pool of `num_threads`, the caller's own included, that computes with `isa`.
    ///
    /// Panics if the machine lacks `isa`, if `num_threads` is not in `1..=MAX_NUM_THREADS`, or if
    /// the system refuses a thread.
    pub fn new(num_threads: usize, isa: Isa) -> Self {
        assert!((1..=MAX_NUM_THREADS).contains(&num_threads), "{num_threads} threads");
        assert!(isa.is_available(), "this machine has no {}", isa.name());
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            generation: AtomicU64::new(0),
            num_active: AtomicUsize::new(0),
            posted: Condvar::new(),
            left: Condvar::new(),
        });
        let spawn = |i: usize| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name(format!("fastserve-cpu-{i}"))
                .spawn(move || shared.work())
                .expect("the system refuses a thread")
        };
        let workers = (1..num_threads).map(spawn).collect();
        Self { isa, shared, workers, turn: Mutex::default(), process: std::process::id() }
    }

    /// Threads that compute, the caller's own included.
    pub fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Instruction set that kernels use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Whether work of about `work_ns` nanoseconds of one core would be shared out.
    pub(crate) fn shares(&self, work_ns: usize) -> bool {
        !self.workers.is_empty() && work_ns >= SMALL_WORK_NS && std::process::id() == self.process
    }

    /// Compute items `0..num_items` of `kernel`, about `work_ns` nanoseconds of one core in all.
    ///
    /// A panic in any of them is raised here once all threads have stopped. A kernel must not call
    /// `run` of the same pool.
    pub(crate) fn run<K: Kernel>(&self, kernel: &K, num_items: usize, work_ns: usize) {
        let isa = self.isa;
        let compute = |item| {
            // SAFETY: `new` saw that the machine has `isa`.
            unsafe { simd::run(isa, kernel, item) }
        };
        if num_items < 2 || !self.shares(work_ns) {
            return (0..num_items).for_each(compute);
        }
        let next = AtomicUsize::new(0);
        let claim = || {
            loop {
                let item = next.fetch_add(1, Ordering::Relaxed);
                if item >= num_items {
                    return;
                }
                compute(item);
            }
        };
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let panic = self.share(&claim, num_items - 1);
        drop(turn);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Run `claim` here and on up to `num_wanted` workers, and return the first panic.
    fn share(&self, claim: &(dyn Fn() + Sync), num_wanted: usize) -> Option<Panic> {
        // SAFETY: only the lifetime changes; invariants 1 and 2 keep workers inside it.
        let job = unsafe { std::mem::transmute::<&(dyn Fn() + Sync), Job>(claim) };
        let mut state = self.shared.lock();
        state.job = Some(job);
        state.generation += 1;
        self.shared.generation.store(state.generation, Ordering::Release);
        // Those that are awake see the generation; waking nobody would cost a system call too.
        let num_asleep = state.num_asleep;
        drop(state);
        if num_wanted >= num_asleep && num_asleep > 0 {
            self.shared.posted.notify_all();
        } else {
            (0..num_wanted.min(num_asleep)).for_each(|_| self.shared.posted.notify_one());
        }

        let own = catch_unwind(AssertUnwindSafe(claim)).err();

        self.shared.lock().job = None;
        for _ in 0..NUM_LAST_SPINS {
            if self.shared.num_active.load(Ordering::Acquire) == 0 {
                break;
            }
            std::hint::spin_loop();
        }
        let mut state = self.shared.lock();
        while state.num_active > 0 {
            state.caller_waits = true;
            state = self.shared.left.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.caller_waits = false;
        }
        own.or(state.panic.take()).inspect(|_| state.panic = None)
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} threads, {})", self.num_threads(), self.isa.name())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if std::process::id() != self.process {
            // The threads are not in this process; there is nothing to join.
            return std::mem::forget(std::mem::take(&mut self.workers));
        }
        self.shared.lock().is_closed = true;
        self.shared.posted.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of kernels, and has none of its own.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// The state is consistent between any two statements, so a poisoned lock is a good one.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Life of a worker.
    fn work(&self) {
        let mut seen = 0;
        while let Some(job) = self.next_job(&mut seen) {
            // `next_job` counted this thread as active, so `Pool::share` keeps the closure alive.
            let result = catch_unwind(AssertUnwindSafe(job));
            let mut state = self.lock();
            if let Err(payload) = result {
                state.panic.get_or_insert(payload);
            }
            state.num_active -= 1;
            self.num_active.store(state.num_active, Ordering::Release);
            if state.num_active == 0 && state.caller_waits {
                self.left.notify_one();
            }
        }
    }

    /// Wait for a job newer than `seen` and join it; `None` when the pool closes.
    fn next_job(&self, seen: &mut u64) -> Option<Job> {
        for _ in 0..NUM_SPINS {
            if self.generation.load(Ordering::Acquire) != *seen {
                break;
            }
            std::hint::spin_loop();
        }
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if state.generation != *seen {
                *seen = state.generation;
                if let Some(job) = state.job {
                    state.num_active += 1;
                    self.num_active.store(state.num_active, Ordering::Release);
                    return Some(job);
                }
            }
            state.num_asleep += 1;
            state = self.posted.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.num_asleep -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Simd;
    use std::collections::BTreeSet;
    use std::thread::ThreadId;

    /// Counts how often each item is computed.
    struct Count {
        items: Vec<AtomicUsize>,
        threads: Mutex<BTreeSet<String>>,
        fails_at: Option<usize>,
    }

    impl Count {
        fn new(num_items: usize, fails_at: Option<usize>) -> Self {
            let items = (0..num_items).map(|_| AtomicUsize::new(0)).collect();
            Self { items, threads: Mutex::default(), fails_at }
        }

        fn check(&self) {
            for (i, item) in self.items.iter().enumerate() {
                assert_eq!(item.load(Ordering::Relaxed), 1, "item {i}");
            }
        }
    }

    impl Kernel for Count {
        #[inline(always)]
        fn run<S: Simd>(&self, _simd: S, item: usize) {
            self.items[item].fetch_add(1, Ordering::Relaxed);
            let id: ThreadId = std::thread::current().id();
            self.threads.lock().unwrap().insert(format!("{id:?}"));
            assert_ne!(Some(item), self.fails_at, "planted");
        }
    }

    const MUCH: usize = 1_000_000_000;

    #[test]
    fn every_item_is_computed_once() {
        for num_threads in [1, 2, 5] {
            let pool = Pool::new(num_threads, Isa::Portable);
            for num_items in [0, 1, 2, 3, 100] {
                for work in [0, MUCH] {
                    let count = Count::new(num_items, None);
                    pool.run(&count, num_items, work);
                    count.check();
                }
            }
        }
    }

    #[test]
    fn small_work_stays_with_the_caller() {
        let pool = Pool::new(3, Isa::Portable);
        let count = Count::new(1000, None);
        pool.run(&count, 1000, SMALL_WORK_NS - 1);
        count.check();
        assert_eq!(count.threads.into_inner().unwrap().len(), 1);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives() {
        let pool = Pool::new(3, Isa::Portable);
        for item in [0, 50, 99] {
            let count = Count::new(100, Some(item));
            let caught = catch_unwind(AssertUnwindSafe(|| pool.run(&count, 100, MUCH)));
            let text = caught.unwrap_err().downcast::<String>().unwrap();
            assert!(text.contains("planted"), "{text}");
            let count = Count::new(100, None);
            pool.run(&count, 100, MUCH);
            count.check();
        }
    }

    #[test]
    fn callers_take_turns() {
        let pool = Pool::new(3, Isa::Portable);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let count = Count::new(7, None);
                        pool.run(&count, 7, MUCH);
                        count.check();
                    }
                });
            }
        });
    }
}
