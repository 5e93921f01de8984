//! The heap against a sorted list.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::test_support::assert_panics;

const CAPACITY: u32 = 40;

#[derive(Debug, Clone)]
enum Op {
    Insert(u32, u64),
    Remove(u32),
    ReplaceFirst(u32, u64),
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    let block = 0..CAPACITY;
    // Few values, so that ties are common and the block decides.
    let last_use = 0..6_u64;
    prop_oneof![
        40 => (block.clone(), last_use.clone()).prop_map(|(block, last)| Op::Insert(block, last)),
        20 => block.clone().prop_map(Op::Remove),
        10 => (block, last_use).prop_map(|(block, last)| Op::ReplaceFirst(block, last)),
        1 => Just(Op::Clear),
    ]
}

proptest! {
    #[test]
    fn heap_agrees_with_a_sorted_list(ops in vec(op(), 0..200)) {
        let mut lru = Lru::new(CAPACITY);
        let mut list: Vec<(u64, u32)> = Vec::new();
        for op in ops {
            let absent = |block: u32| list.iter().all(|(_, listed)| *listed != block);
            match op {
                Op::Insert(block, last_use) if absent(block) => {
                    lru.insert(BlockId(block), last_use);
                    list.push((last_use, block));
                }
                Op::ReplaceFirst(block, last_use) if absent(block) && !list.is_empty() => {
                    lru.replace_first(BlockId(block), last_use);
                    list[0] = (last_use, block);
                }
                Op::Remove(block) => {
                    lru.remove(BlockId(block));
                    list.retain(|(_, listed)| *listed != block);
                }
                Op::Clear => {
                    lru.clear();
                    list.clear();
                }
                Op::Insert(..) | Op::ReplaceFirst(..) => {}
            }
            list.sort_unstable();
            prop_assert_eq!(lru.first(), list.first().map(|(_, block)| BlockId(*block)));
            lru.check(|block| list.iter().find(|(_, b)| *b == block.0).map(|(last, _)| *last));
        }
        // Whatever is left comes out in order.
        for (_, block) in list {
            prop_assert_eq!(lru.first(), Some(BlockId(block)));
            lru.remove(BlockId(block));
        }
        prop_assert_eq!(lru.first(), None);
    }
}

/// Blocks 1 to 6, each as old as its number.
fn six() -> Lru {
    let mut lru = Lru::new(8);
    (1..7).for_each(|block| lru.insert(BlockId(block), u64::from(block)));
    lru
}

fn age(block: BlockId) -> Option<u64> {
    (1..7).contains(&block.0).then_some(u64::from(block.0))
}

#[test]
fn a_block_is_in_the_heap_once() {
    assert_panics("is in the heap already", || six().insert(BlockId(3), 9));
    assert_panics("is in the heap already", || six().replace_first(BlockId(3), 9));
    assert_panics("a first block to replace", || Lru::new(8).replace_first(BlockId(3), 9));
}

#[test]
fn check_notices_every_broken_invariant() {
    let broken = |change: fn(&mut Lru)| {
        move || {
            let mut lru = six();
            lru.check(age);
            change(&mut lru);
            lru.check(age);
        }
    };
    assert_panics("heap order at 5", broken(|lru| lru.put(5, lru.heap[0])));
    assert_panics("place of BlockId(6)", broken(|lru| lru.remove(BlockId(6))));
    assert_panics("place of BlockId(7)", broken(|lru| lru.insert(BlockId(7), 7)));
    assert_panics("place of BlockId(6)", broken(|lru| lru.heap[5].last_use = 9));
    assert_panics("place of BlockId(0)", broken(|lru| lru.places[0] = lru.places[1]));
    assert_panics(
        "blocks in the heap",
        broken(|lru| lru.heap.push(Key { last_use: 8, block: BlockId(7) })),
    );
}
