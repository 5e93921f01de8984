//! Memory of every size around the limit comes zeroed where asked, aligned, keeps its contents when it
//! grows and shrinks, and goes back.

use std::alloc::{GlobalAlloc, Layout};

use fastserve_alloc::{HugePages, LARGE};

#[global_allocator]
static ALLOCATOR: HugePages = HugePages;

const SIZES: [usize; 9] = [
    1,
    4096,
    LARGE - 1,
    LARGE,
    LARGE + 1,
    LARGE + 4095,
    LARGE + (2 << 20) - 1,
    LARGE + (2 << 20),
    3 * LARGE + 12_345,
];

fn pattern(index: usize) -> u8 {
    (index.wrapping_mul(2_654_435_761) >> 13) as u8
}

#[test]
fn fresh_memory_is_zero_also_after_use() {
    for size in SIZES {
        for _ in 0..3 {
            let mut bytes = vec![0_u8; size];
            assert!(bytes.iter().all(|&byte| byte == 0), "{size} bytes");
            bytes.fill(0xAB);
        }
    }
}

#[test]
fn contents_survive_every_change_of_size() {
    for from in SIZES {
        for to in SIZES {
            let mut bytes: Vec<u8> = (0..from).map(pattern).collect();
            bytes.shrink_to_fit();
            bytes.truncate(to);
            bytes.reserve_exact(to.saturating_sub(bytes.len()));
            bytes.shrink_to_fit();
            let kept = from.min(to);
            assert_eq!(bytes.len(), kept);
            assert!(
                bytes.iter().enumerate().all(|(i, &byte)| byte == pattern(i)),
                "{from} to {to}"
            );
            bytes.extend((kept..to).map(pattern));
            assert!(
                bytes.iter().enumerate().all(|(i, &byte)| byte == pattern(i)),
                "{from} to {to}"
            );
        }
    }
}

#[test]
fn alignment_is_kept() {
    for size in SIZES {
        for align in [1, 8, 64, 4096, 1 << 21, 1 << 22] {
            let layout = Layout::from_size_align(size, align).expect("a layout");
            // SAFETY: the layout is not empty, and the memory goes back with it.
            unsafe {
                let pointer = ALLOCATOR.alloc(layout);
                assert!(!pointer.is_null());
                assert!(pointer.addr().is_multiple_of(align), "{size} bytes at {align}");
                pointer.write(1);
                pointer.add(size - 1).write(2);
                ALLOCATOR.dealloc(pointer, layout);
            }
        }
    }
}

#[test]
fn more_than_there_is_is_refused() {
    let layout = Layout::from_size_align(isize::MAX as usize & !0xFFF, 8).expect("a layout");
    // SAFETY: the layout is not empty.
    assert!(unsafe { ALLOCATOR.alloc(layout) }.is_null());
    assert!(Vec::<u8>::new().try_reserve_exact(isize::MAX as usize).is_err());
}

/// Mappings of the process, as the kernel lists them.
#[cfg(target_os = "linux")]
fn mapped_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find(|line| line.starts_with("VmSize")).expect("VmSize");
    let kib: usize = line.split_whitespace().nth(1).expect("a number").parse().expect("a number");
    kib * 1024
}

#[test]
#[cfg(target_os = "linux")]
fn memory_goes_back() {
    let big = 8 * LARGE;
    drop(vec![1_u8; big]);
    let before = mapped_bytes();
    for _ in 0..8 {
        let bytes = vec![1_u8; big];
        assert_eq!(bytes[big / 2], 1);
    }
    // Other tests of this process hold some tens of megabytes at times.
    assert!(mapped_bytes() < before + 2 * big, "eight allocations of {big} bytes left their pages");
}
