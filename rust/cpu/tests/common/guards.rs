//! An allocator that puts every buffer against a page that must not be touched.
//!
//! A test binary that installs [`Guards`] as its global allocator and asks for a [`Side`] on a thread
//! has, for whatever that thread allocates from then on, pages of its own between two pages that
//! nobody may read or write. The buffer is flush with the page after it or with the page before it
//! (a size that is no multiple of the alignment leaves the bytes that rounding takes). Memory that was
//! given back cannot be touched again either: no address is used twice. So this reaches memory that the
//! crate allocates itself: packed weights, scratch, parked partials.
//!
//! What goes outside ends the process by SIGSEGV, after the name of the [`case`] was printed.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fmt::Display;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The neighbour that a buffer touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// The page after it.
    End,
    /// The page before it.
    Start,
}

/// Addresses to give out, none twice.
const REGION_BYTES: usize = 64 << 30;

thread_local! {
    static SIDE: Cell<Option<Side>> = const { Cell::new(None) };
    static CASE: Cell<&'static str> = const { Cell::new("an unnamed case") };
}

static NEXT: AtomicUsize = AtomicUsize::new(0);

/// What the thread allocates from now on touches a guard on that side; `None`: nothing special.
pub(crate) fn guard(side: Option<Side>) {
    region();
    SIDE.set(side);
}

/// Do something whose buffers need no guards: it is faster.
pub(crate) fn unguarded<T>(what: impl FnOnce() -> T) -> T {
    let side = SIDE.replace(None);
    let result = what();
    SIDE.set(side);
    result
}

/// Name what the thread does next.
pub(crate) fn case(name: &dyn Display) {
    CASE.set(unguarded(|| name.to_string().leak()));
}

/// First address of the region. No access is allowed but where buffers are.
fn region() -> usize {
    static REGION: OnceLock<usize> = OnceLock::new();
    *REGION.get_or_init(|| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the system's choice, and a handler that calls only
        // what is allowed in one.
        let at = unsafe {
            libc::signal(libc::SIGSEGV, report as *const () as libc::sighandler_t);
            libc::signal(libc::SIGBUS, report as *const () as libc::sighandler_t);
            libc::mmap(null_mut(), REGION_BYTES, libc::PROT_NONE, flags, -1, 0)
        };
        assert!(at != libc::MAP_FAILED, "{REGION_BYTES} bytes of addresses");
        at as usize
    })
}

/// Print the case and let the signal do what it does.
extern "C" fn report(signal: i32) {
    for text in ["an access outside a buffer: ", CASE.get(), "\n"] {
        // SAFETY: writes a string to stderr; allowed in a handler.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    }
    // SAFETY: the default is to end the process, when the access is tried again.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

/// Bytes of a page. Asked for in the allocator, so nothing may be allocated here.
fn page() -> usize {
    // SAFETY: asks the system for a number.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// The allocator.
pub(crate) struct Guards;

// SAFETY: guarded memory is the system's fresh pages, given out once; other memory is the system's
// allocator's, to which it is given back: `contains` tells them apart.
unsafe impl GlobalAlloc for Guards {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match SIDE.get() {
            // SAFETY: the caller's promise.
            None => unsafe { System.alloc(layout) },
            Some(side) => guarded(side, layout),
        }
    }

    unsafe fn dealloc(&self, data: *mut u8, layout: Layout) {
        if !contains(data) {
            // SAFETY: the caller's promise, and it is not ours.
            return unsafe { System.dealloc(data, layout) };
        }
        let (start, num_bytes) = pages(data as usize, layout.size());
        // SAFETY: the buffer's own pages, which nobody uses any more.
        unsafe {
            libc::mprotect(start as *mut _, num_bytes, libc::PROT_NONE);
            libc::madvise(start as *mut _, num_bytes, libc::MADV_DONTNEED);
        }
    }
}

/// Whole pages that have the bytes from `at` on.
fn pages(at: usize, len: usize) -> (usize, usize) {
    let page = page();
    let start = at / page * page;
    (start, (at + len).next_multiple_of(page) - start)
}

fn contains(data: *mut u8) -> bool {
    NEXT.load(Ordering::Relaxed) > 0
        && (region()..region() + REGION_BYTES).contains(&(data as usize))
}

fn guarded(side: Side, layout: Layout) -> *mut u8 {
    let page = page();
    assert!(layout.align() <= page, "alignment");
    let num_bytes = layout.size().next_multiple_of(page);
    // One page more than it takes: the guard that it shares with the next buffer.
    let at = NEXT.fetch_add(num_bytes + page, Ordering::Relaxed) + page;
    if at + num_bytes + page > REGION_BYTES {
        return null_mut();
    }
    let start = region() + at;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: pages of the region that nobody was given.
    if unsafe { libc::mprotect(start as *mut _, num_bytes, access) } != 0 {
        return null_mut();
    }
    let slack = match side {
        Side::Start => 0,
        Side::End => (num_bytes - layout.size()) / layout.align() * layout.align(),
    };
    (start + slack) as *mut u8
}
