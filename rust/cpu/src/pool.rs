//! A fixed set of threads that share out the items of one kernel at a time.
//!
//! The caller's thread is one of them: it posts a job, works on it like the others, and returns
//! when every item is done. Items are claimed from a counter, so a thread that comes late (or never:
//! it may have lost its core to someone else) costs nothing; the caller waits only for threads that
//! have begun. Which thread computes an item never shows in the result.
//!
//! Posting, joining and leaving a job are single operations on one word, so that a job costs little
//! while the workers look out for it. They look out for a few microseconds after a job,
//! because threads of others share the cores, and for longer inside a [`session`](Pool::session): a
//! decoder's step is hundreds of jobs with little between them. Then they sleep until they are woken.
//! Jobs too small to be worth sharing run on the caller alone.
//!
//! # Invariants
//!
//! 1. The word is open only while [`Pool::run`] is in progress, which keeps what `job` points to alive.
//! 2. A worker counts itself in the word as it finds it open, in one operation, and reads `job` only
//!    between that and its leaving. So `job` is written only while the word is closed and counts nobody.
//! 3. `Pool::run` returns, or unwinds, only when the word is closed and counts nobody.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::isa::Isa;
use crate::simd::{self, Kernel};

/// Most threads a pool may have.
pub const MAX_NUM_THREADS: usize = 1024;

/// Times a worker looks for a job before it sleeps: 1 to 5 µs, by what a machine's pause takes.
const NUM_SPINS: usize = 100;

/// The same inside a session: 50 to 250 µs, more than its caller computes alone.
const NUM_SESSION_SPINS: usize = 5_000;

/// Times the caller looks whether the workers have left before it sleeps: 20 to 100 µs. They have
/// begun their last items, and being woken takes about as long.
const NUM_LAST_SPINS: usize = 2_000;

/// Work, in nanoseconds of one core, below which waking a thread costs more than it brings.
const SMALL_WORK_NS: usize = 15_000;

/// The same where nobody sleeps: below it, half of the work is not worth moving to another core.
const SMALL_AWAKE_WORK_NS: usize = 3_000;

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
    word: AtomicU64,
    /// Of the open word.
    job: UnsafeCell<Option<Job>>,
    num_sessions: AtomicUsize,
    /// Workers that wait on `posted`, or are about to.
    num_asleep: AtomicUsize,
    caller_waits: AtomicBool,
    is_closed: AtomicBool,
    /// The first panic of a worker in the job in progress.
    panic: Mutex<Option<Panic>>,
    sleep: Mutex<()>,
    posted: Condvar,
    left: Condvar,
}

// SAFETY: `job` is the only part that is not `Sync` by itself; invariant 2 says who may use it when.
unsafe impl Sync for Shared {}

// SAFETY: a job is `Sync`, so any thread may be the one that drops the reference to it.
unsafe impl Send for Shared {}

/// The word: number of the job in the upper half, whether it is open, and how many workers are in it.
const OPEN: u64 = 1 << 31;
const COUNT: u64 = OPEN - 1;

fn number(word: u64) -> u64 {
    word >> 32
}

/// What a panic carries.
type Panic = Box<dyn Any + Send>;

/// The closure of the call of [`Pool::run`] in progress, its lifetime erased.
type Job = &'static (dyn Fn() + Sync);

/// While it lives, workers look out for jobs longer before they sleep.
pub(crate) struct Session<'a>(&'a Shared);

impl Drop for Session<'_> {
    fn drop(&mut self) {
        self.0.num_sessions.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Pool {
    /// A pool of `num_threads`, the caller's own included, that computes with `isa`.
    ///
    /// Panics if the machine lacks `isa`, if `num_threads` is not in `1..=MAX_NUM_THREADS`, or if
    /// the system refuses a thread.
    pub fn new(num_threads: usize, isa: Isa) -> Self {
        assert!((1..=MAX_NUM_THREADS).contains(&num_threads), "{num_threads} threads");
        assert!(isa.is_available(), "this machine has no {}", isa.name());
        let shared = Arc::new(Shared {
            word: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            num_sessions: AtomicUsize::new(0),
            num_asleep: AtomicUsize::new(0),
            caller_waits: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            panic: Mutex::default(),
            sleep: Mutex::default(),
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

    /// Many jobs will follow each other closely until the session is dropped.
    pub(crate) fn session(&self) -> Session<'_> {
        self.shared.num_sessions.fetch_add(1, Ordering::Relaxed);
        Session(&self.shared)
    }

    /// Whether work of about `work_ns` nanoseconds of one core would be shared out.
    pub(crate) fn shares(&self, work_ns: usize) -> bool {
        let sleeps = self.shared.num_asleep.load(Ordering::Relaxed) > 0;
        !self.workers.is_empty()
            && work_ns >= if sleeps { SMALL_WORK_NS } else { SMALL_AWAKE_WORK_NS }
            && std::process::id() == self.process
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
        let panic = self.shared.share(&claim, num_items - 1);
        drop(turn);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
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
        self.shared.is_closed.store(true, Ordering::SeqCst);
        self.shared.wake(usize::MAX);
        for worker in self.workers.drain(..) {
            // A worker catches the panics of kernels, and has none of its own.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Nothing is behind the lock but sleeping itself.
    fn lock(&self) -> MutexGuard<'_, ()> {
        self.sleep.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The caller's part: run `claim` here and on up to `num_wanted` workers. Returns the first panic.
    fn share(&self, claim: &(dyn Fn() + Sync), num_wanted: usize) -> Option<Panic> {
        // SAFETY: only the lifetime changes; invariants 1 and 2 keep workers inside it.
        let job = unsafe { std::mem::transmute::<&(dyn Fn() + Sync), Job>(claim) };
        let last = self.word.load(Ordering::Relaxed);
        debug_assert!(last & (OPEN | COUNT) == 0, "one caller at a time");
        // SAFETY: by invariant 2 nobody reads it: the word is closed and counts nobody.
        unsafe { *self.job.get() = Some(job) };
        let opened = (number(last).wrapping_add(1) << 32) | OPEN;
        // Before the look at who sleeps, in the one order that all threads see.
        self.word.store(opened, Ordering::SeqCst);
        if self.num_asleep.load(Ordering::SeqCst) > 0 {
            self.wake(num_wanted);
        }

        let own = catch_unwind(AssertUnwindSafe(claim)).err();

        self.word.fetch_and(!OPEN, Ordering::AcqRel);
        self.wait_for_workers();
        let theirs = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        own.or(theirs)
    }

    /// Wake up to `num_wanted` of those that sleep.
    fn wake(&self, num_wanted: usize) {
        let guard = self.lock(); // Whoever is about to sleep does, or sees why not.
        let num_asleep = self.num_asleep.load(Ordering::Relaxed);
        drop(guard);
        if num_wanted >= num_asleep {
            self.posted.notify_all();
        } else {
            (0..num_wanted).for_each(|_| self.posted.notify_one());
        }
    }

    /// Until the closed word counts nobody.
    fn wait_for_workers(&self) {
        for _ in 0..NUM_LAST_SPINS {
            if self.word.load(Ordering::Acquire) & COUNT == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        let mut guard = self.lock();
        self.caller_waits.store(true, Ordering::SeqCst);
        while self.word.load(Ordering::SeqCst) & COUNT > 0 {
            guard = self.left.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_waits.store(false, Ordering::Relaxed);
    }

    /// Life of a worker.
    fn work(&self) {
        let mut seen = 0;
        while self.join_next(&mut seen) {
            // SAFETY: `join_next` counted this thread in the open word (invariant 2).
            let job = unsafe { *self.job.get() };
            // Whatever panics, this thread leaves the job, or its caller would wait for ever.
            let work = AssertUnwindSafe(|| job.expect("an open word has a job")());
            if let Err(payload) = catch_unwind(work) {
                let mut panic = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
                panic.get_or_insert(payload);
            }
            let left = self.word.fetch_sub(1, Ordering::SeqCst) - 1;
            if left & (OPEN | COUNT) == 0 && self.caller_waits.load(Ordering::SeqCst) {
                drop(self.lock()); // The caller waits, or sees that nobody is left.
                self.left.notify_one();
            }
        }
    }

    /// Wait for a job whose number is not `seen` and join it; `false` when the pool closes.
    fn join_next(&self, seen: &mut u64) -> bool {
        loop {
            let in_session = self.num_sessions.load(Ordering::Relaxed) > 0;
            for _ in 0..if in_session { NUM_SESSION_SPINS } else { NUM_SPINS } {
                if self.try_join(seen) {
                    return true;
                }
                std::hint::spin_loop();
            }
            let mut guard = self.lock();
            // Before the last look at the word, in the one order that all threads see.
            self.num_asleep.fetch_add(1, Ordering::SeqCst);
            while !self.is_closed.load(Ordering::SeqCst) && !self.is_posted(*seen) {
                guard = self.posted.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            self.num_asleep.fetch_sub(1, Ordering::Relaxed);
            drop(guard);
            if self.is_closed.load(Ordering::Relaxed) {
                return false;
            }
        }
    }

    /// Whether there is a job to join.
    fn is_posted(&self, seen: u64) -> bool {
        let word = self.word.load(Ordering::SeqCst);
        word & OPEN > 0 && number(word) != seen
    }

    /// Count this thread in the word, if it is open for another job than `seen`.
    fn try_join(&self, seen: &mut u64) -> bool {
        let mut word = self.word.load(Ordering::Acquire);
        while word & OPEN > 0 && number(word) != *seen {
            match self.word.compare_exchange_weak(
                word,
                word + 1,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    *seen = number(word);
                    return true;
                }
                Err(now) => word = now,
            }
        }
        false
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
        pool.run(&count, 1000, SMALL_AWAKE_WORK_NS - 1);
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
    fn jobs_of_a_session_are_shared_out_and_workers_sleep_between() {
        let pool = Pool::new(3, Isa::Portable);
        for num_jobs in [1, 10, 1000] {
            let session = pool.session();
            for _ in 0..num_jobs {
                let count = Count::new(5, None);
                pool.run(&count, 5, MUCH);
                count.check();
            }
            drop(session);
            while pool.shared.num_asleep.load(Ordering::Relaxed) < 2 {
                std::thread::yield_now();
            }
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
