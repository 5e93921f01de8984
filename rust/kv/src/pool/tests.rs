//! The pool against a model too simple to be wrong: a map from block to its uses, 0 meaning cached.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::test_support::assert_panics;

/// Small, so that exhaustion and sharing happen in most cases.
const CAPACITY: u32 = 8;

#[derive(Debug, Clone)]
enum Op {
    Take,
    Retain(Index),
    Release(Index, Option<u64>),
    Evict(Index),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => Just(Op::Take),
        2 => any::<Index>().prop_map(Op::Retain),
        3 => (any::<Index>(), proptest::option::of(0..1_u64 << 40))
            .prop_map(|(index, keep)| Op::Release(index, keep)),
        1 => any::<Index>().prop_map(Op::Evict),
    ]
}

/// Blocks that are not free: their uses and, where there are none, when the last one ended.
type Model = BTreeMap<BlockId, (u32, u64)>;

/// One of the blocks for which `want` holds.
fn pick(model: &Model, index: Index, want: fn(u32) -> bool) -> Option<BlockId> {
    let blocks: Vec<_> = model.iter().filter(|(_, (uses, _))| want(*uses)).collect();
    (!blocks.is_empty()).then(|| *index.get(&blocks).0)
}

fn apply(pool: &mut BlockPool, model: &mut Model, op: &Op) {
    match *op {
        Op::Take => {
            let taken = pool.take();
            assert_eq!(taken.is_some(), model.len() < CAPACITY as usize);
            if let Some(block) = taken {
                assert!(model.insert(block, (1, 0)).is_none(), "{block:?} handed out twice");
            }
        }
        Op::Retain(index) => {
            let Some(block) = pick(model, index, |_| true) else {
                return;
            };
            pool.retain(block);
            model.entry(block).and_modify(|(uses, _)| *uses += 1);
        }
        Op::Release(index, keep) => {
            let Some(block) = pick(model, index, |uses| uses > 0) else {
                return;
            };
            pool.release(block, keep);
            let (uses, last_use) = model.get_mut(&block).expect("picked from it");
            *uses -= 1;
            if *uses == 0 {
                match keep {
                    Some(now) => *last_use = now,
                    None => drop(model.remove(&block)),
                }
            }
        }
        Op::Evict(index) => {
            let Some(block) = pick(model, index, |uses| uses == 0) else {
                return;
            };
            pool.evict(block);
            model.remove(&block);
        }
    }
}

fn compare(pool: &BlockPool, model: &Model, capacity: u32) {
    pool.check();
    let num_cached = model.values().filter(|(uses, _)| *uses == 0).count();
    assert_eq!(pool.num_cached(), num_cached);
    assert_eq!(pool.num_free(), capacity as usize - model.len());
    assert_eq!(pool.capacity(), capacity as usize);
    for block in (0..capacity).map(BlockId) {
        let state = match model.get(&block) {
            None => BlockState::Free,
            Some((0, last_use)) => BlockState::Cached { last_use: *last_use },
            Some((uses, _)) => BlockState::Held(NonZeroU32::new(*uses).expect("not zero")),
        };
        assert_eq!(pool.state(block), state, "{block:?}");
        assert_eq!(pool.num_uses(block), model.get(&block).map_or(0, |(uses, _)| *uses));
        let last_use = model.get(&block).filter(|(uses, _)| *uses == 0).map(|(_, last)| *last);
        assert_eq!(pool.last_use(block), last_use);
    }
}

proptest! {
    #[test]
    fn pool_agrees_with_the_model(ops in vec(op(), 0..64)) {
        let (mut pool, mut model) = (BlockPool::new(CAPACITY), Model::new());
        for op in &ops {
            apply(&mut pool, &mut model, op);
            compare(&pool, &model, CAPACITY);
        }
    }
}

/// A pool with one block of each state: 0 held twice, 1 cached, 2 free.
fn one_of_each() -> BlockPool {
    let mut pool = BlockPool::new(3);
    assert_eq!((pool.take(), pool.take()), (Some(BlockId(0)), Some(BlockId(1))));
    pool.retain(BlockId(0));
    pool.release(BlockId(1), Some(7));
    pool
}

#[test]
fn low_ids_go_first_and_the_block_freed_last_goes_next() {
    let mut pool = one_of_each();
    pool.evict(BlockId(1));
    assert_eq!(pool.take(), Some(BlockId(1)));
    assert_eq!(pool.take(), Some(BlockId(2)));
    assert_eq!(pool.take(), None);
}

#[test]
fn wrong_states_are_refused() {
    assert_panics("is free and cannot be retained", || one_of_each().retain(BlockId(2)));
    assert_panics("is not held", || one_of_each().release(BlockId(1), None));
    assert_panics("is not held", || one_of_each().release(BlockId(2), None));
    assert_panics("is not cached", || one_of_each().evict(BlockId(0)));
    assert_panics("is not cached", || one_of_each().evict(BlockId(2)));
}

#[test]
fn check_notices_every_broken_invariant() {
    let broken = |change: fn(&mut BlockPool)| {
        move || {
            let mut pool = one_of_each();
            pool.check();
            change(&mut pool);
            pool.check();
        }
    };
    assert_panics("free count", broken(|pool| pool.free.truncate(0)));
    assert_panics("cached count", broken(|pool| pool.num_cached += 1));
    assert_panics("listed free", broken(|pool| pool.free[0] = BlockId(0)));
    assert_panics(
        "listed free twice",
        broken(|pool| {
            pool.set_state(BlockId(1), BlockState::Free);
            pool.num_cached -= 1;
            pool.free.push(BlockId(2));
        }),
    );
}

/// Every sequence of up to five operations on three blocks.
#[test]
fn every_short_history() {
    fn walk(pool: &BlockPool, model: &Model, depth: u32, num_histories: &mut u64) {
        compare(pool, model, 3);
        *num_histories += 1;
        if depth == 0 {
            return;
        }
        let mut follow = |block: Option<BlockId>, change: &dyn Fn(&mut BlockPool, &mut Model)| {
            if block.is_none_or(|block| model.contains_key(&block)) {
                let (mut pool, mut model) = (pool.clone(), model.clone());
                change(&mut pool, &mut model);
                walk(&pool, &model, depth - 1, num_histories);
            }
        };
        follow(None, &|pool, model| match pool.take() {
            Some(block) => assert!(model.insert(block, (1, 0)).is_none()),
            None => assert_eq!(model.len(), 3),
        });
        for block in (0..3).map(BlockId) {
            follow(Some(block), &|pool, model| {
                pool.retain(block);
                model.entry(block).and_modify(|(uses, _)| *uses += 1);
            });
            for keep in [None, Some(u64::from(depth))] {
                follow(Some(block), &|pool, model| match model[&block] {
                    (0, _) => {
                        pool.evict(block);
                        model.remove(&block);
                    }
                    (1, _) if keep.is_none() => {
                        pool.release(block, None);
                        model.remove(&block);
                    }
                    (uses, last_use) => {
                        pool.release(block, keep);
                        model.insert(block, (uses - 1, keep.unwrap_or(last_use)));
                    }
                });
            }
        }
    }
    let mut num_histories = 0;
    walk(&BlockPool::new(3), &Model::new(), 5, &mut num_histories);
    assert!(num_histories > 500, "{num_histories} histories");
}
