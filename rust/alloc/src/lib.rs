//! The system's allocator, with large arrays in huge pages.
//!
//! The core of a large pool is a few arrays of many megabytes, and a step touches them all over. In
//! pages of 4 KiB nearly each of these loads also misses the translation cache, and the processor walks
//! the page tables before it can even ask for the line; in a virtual machine that walk alone is longer
//! than the load. In pages of 2 MiB a pool of millions of blocks fits the translation cache.
//!
//! A library does not choose the allocator of a program. The extension module and the benches use this
//! one; a Rust embedder may:
//!
//! ```
//! #[global_allocator]
//! static ALLOCATOR: fastserve_alloc::HugePages = fastserve_alloc::HugePages;
//! ```
//!
//! On Linux, allocations of [`LARGE`] bytes or more are mapped at a multiple of the huge page size and
//! the kernel is asked (`madvise`) to back them with huge pages, which it does unless
//! `/sys/kernel/mm/transparent_hugepage/enabled` says `never`. Memory is still given when it is first
//! touched, 2 MiB at a time. All else, and all other systems: the system's allocator.

use std::alloc::{GlobalAlloc, Layout, System};

/// Allocations of so many bytes get pages of their own. Above any vector that a request has: those are
/// reserved whole and touched in part.
pub const LARGE: usize = 16 << 20;

/// See the module header.
#[derive(Debug, Clone, Copy, Default)]
pub struct HugePages;

// SAFETY: a layout is either large or not, so memory goes back to where it came from; both sides keep
// the contract of `GlobalAlloc`.
unsafe impl GlobalAlloc for HugePages {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if pages::is_large(layout) {
            return pages::map(layout.size());
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if pages::is_large(layout) {
            return pages::map(layout.size()); // Fresh pages are zero.
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if pages::is_large(layout) {
            // SAFETY: `map` gave out `pointer` for this size.
            return unsafe { pages::unmap(pointer, layout.size()) };
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises that `size`, rounded up to the alignment, fits an `isize`.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if !pages::is_large(layout) && !pages::is_large(wanted) {
            // SAFETY: the caller's promise, passed on.
            return unsafe { System.realloc(pointer, layout, size) };
        }
        // SAFETY: `wanted` is not empty; the two blocks are distinct and at least as long as what is
        // copied; `pointer` came with `layout`.
        unsafe {
            let moved = self.alloc(wanted);
            if !moved.is_null() {
                std::ptr::copy_nonoverlapping(pointer, moved, layout.size().min(size));
                self.dealloc(pointer, layout);
            }
            moved
        }
    }
}

#[cfg(target_os = "linux")]
mod pages {
    use std::alloc::Layout;
    use std::ptr;

    /// Bytes of a huge page where base pages have 4 KiB.
    const HUGE: usize = 2 << 20;

    pub(crate) fn is_large(layout: Layout) -> bool {
        layout.size() >= super::LARGE && layout.align() <= HUGE
    }

    /// Zeroed memory at a multiple of [`HUGE`], or null.
    pub(crate) fn map(size: usize) -> *mut u8 {
        // Room to move up to the next multiple; the rest is given back. `HUGE` is a multiple of every
        // base page, and a tail shorter than a huge page stays as it is.
        let Some(length) = size.checked_next_multiple_of(HUGE) else { return ptr::null_mut() };
        let Some(reserved) = length.checked_add(HUGE) else { return ptr::null_mut() };
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, which overlaps nothing.
        let start = unsafe { libc::mmap(ptr::null_mut(), reserved, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return ptr::null_mut();
        }
        let skip = start.addr().wrapping_neg() % HUGE;
        let first = start.wrapping_byte_add(skip);
        // SAFETY: parts of the mapping that nobody has seen, and advice about the rest. If the kernel
        // refuses any of it, memory is wasted or slow and nothing else.
        unsafe {
            if skip > 0 {
                libc::munmap(start, skip);
            }
            if skip < HUGE {
                libc::munmap(first.wrapping_byte_add(length), HUGE - skip);
            }
            libc::madvise(first, length, libc::MADV_HUGEPAGE);
        }
        first.cast()
    }

    /// Give back what [`map`] gave for `size`.
    ///
    /// # Safety
    ///
    /// `pointer` came from `map(size)` and is not used any more.
    pub(crate) unsafe fn unmap(pointer: *mut u8, size: usize) {
        // SAFETY: the whole mapping, by the caller's promise.
        unsafe { libc::munmap(pointer.cast(), size.next_multiple_of(HUGE)) };
    }
}

#[cfg(not(target_os = "linux"))]
mod pages {
    use std::alloc::Layout;

    pub(crate) fn is_large(_layout: Layout) -> bool {
        false
    }

    pub(crate) fn map(_size: usize) -> *mut u8 {
        unreachable!("nothing is large here")
    }

    pub(crate) unsafe fn unmap(_pointer: *mut u8, _size: usize) {
        unreachable!("nothing is large here")
    }
}
