//! The table against a list, at full load and with hashes that crowd together.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::test_support::assert_panics;

const CAPACITY: u32 = 16;

/// A hash whose search starts at one of few places, near the end of the table or at its beginning, so
/// that searches cross each other and the end.
fn crowded() -> impl Strategy<Value = u64> {
    let home = prop_oneof![Just(0_u64), Just(1), Just(29), Just(30), Just(31)];
    (home, 0..3_u64, 0..2_u64).prop_map(|(home, tag, low)| home << 59 | tag << 32 | low)
}

proptest! {
    #[test]
    fn table_agrees_with_a_list(ops in vec((crowded(), 0..CAPACITY), 0..200)) {
        let mut table = ChildTable::new(CAPACITY);
        let mut list: Vec<(u64, u32)> = Vec::new();
        for (hash, block) in ops {
            if let Some(index) = list.iter().position(|(_, listed)| *listed == block) {
                let (hash, _) = list.swap_remove(index);
                table.remove(hash, BlockId(block));
            } else {
                table.insert(hash, BlockId(block));
                list.push((hash, block));
            }
            prop_assert_eq!(table.count(), list.len());
            for home in 0..32_u64 {
                for low in 0..3_u64 {
                    let hash = home << 59 | low << 32;
                    let mut found: Vec<u32> = table.find(hash).map(|block| block.0).collect();
                    let mut first = [None];
                    table.find_first(&[hash], &mut first);
                    prop_assert_eq!(first[0], found.first().copied().map(BlockId));
                    let mut want: Vec<u32> = list
                        .iter()
                        .filter(|(listed, _)| listed >> 32 == hash >> 32)
                        .map(|(_, block)| *block)
                        .collect();
                    found.sort_unstable();
                    want.sort_unstable();
                    prop_assert_eq!(found, want);
                }
            }
        }
        table.clear();
        prop_assert_eq!(table.count(), 0);
    }
}

#[test]
fn at_most_half_of_the_entries_are_used() {
    for capacity in [1, 2, 3, 1000, 1024, 1025] {
        let table = ChildTable::new(capacity);
        assert!(table.entries.len() >= 2 * capacity as usize);
        assert!(table.entries.len() < 4 * capacity as usize);
        assert_eq!(table.home(u32::MAX), table.entries.len() - 1);
        assert_eq!(table.home(0), 0);
    }
}

#[test]
fn a_block_that_is_not_there_cannot_be_removed() {
    assert_panics("is not in the table", || ChildTable::new(4).remove(1 << 40, BlockId(0)));
    assert_panics("is not in the table", || {
        let mut table = ChildTable::new(4);
        table.insert(1 << 40, BlockId(1));
        table.remove(1 << 40, BlockId(0));
    });
}

#[test]
#[should_panic(expected = "want 1 to 2^30")]
fn an_empty_pool_has_no_table() {
    ChildTable::new(0);
}
