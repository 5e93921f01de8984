//! What callers must not do, what the checker sees, and a few histories told one by one.

use fastserve_base::Token;

use super::*;
use crate::SeqKey;
use crate::pool::BlockState;
use crate::test_support::assert_panics;

const KEY: SeqKey<'_> = SeqKey { namespace: Namespace(0), spans: &[] };
const OTHER: SeqKey<'_> = SeqKey { namespace: Namespace(1), spans: &[] };
const A: RowSlot = RowSlot(0);
const B: RowSlot = RowSlot(1);

/// Slot A holds two shared blocks of 1 and one of its own; two blocks of 2 are cached; three are free.
fn manager() -> KvManager {
    let mut kv = KvManager::new(&small(8, 2));
    kv.open(B, Namespace(0));
    kv.allocate(B, 2).expect("room");
    kv.share(B, KEY, &[2; 4], 2, StepId(2));
    kv.close(B);
    kv.open(A, Namespace(0));
    kv.allocate(A, 3).expect("room");
    kv.share(A, KEY, &[1; 6], 2, StepId(2));
    kv.step_committed(StepId(1));
    kv.check();
    kv
}

#[test]
fn slots_are_opened_and_closed_in_turn() {
    assert_panics("is open already", || manager().open(A, Namespace(0)));
    assert_panics("is not open", || manager().close(B));
    assert_panics("is not open", || manager().allocate(B, 1));
    assert_panics("is not open", || manager().share(B, KEY, &[], 0, StepId(2)));
    assert_panics("is not open", || manager().probe_from(B, KEY, &[], 0));
    assert_panics("is not open", || manager().next_block_hash(B, KEY, &[]));
    assert_panics("is not open", || manager().copy_on_write(B, 0));
    assert_panics("is not open", || manager().fork(A, B));
    assert_panics("is not open", || manager().fork(B, A));
}

#[test]
fn a_fork_needs_an_empty_slot_of_the_same_namespace() {
    let opened = |namespace| {
        let mut kv = manager();
        kv.open(B, namespace);
        kv
    };
    assert_panics("namespace of RowSlot(1)", || opened(Namespace(1)).fork(A, B));
    assert_panics("which is to be a fork", || opened(Namespace(0)).fork(B, A));
    assert_panics("which is to be a fork", || manager().fork(A, A));
}

#[test]
fn a_slot_keeps_its_namespace() {
    assert_panics("namespace of RowSlot(0)", || manager().share(A, OTHER, &[1; 4], 2, StepId(2)));
    assert_panics("namespace of RowSlot(0)", || manager().next_block_hash(A, OTHER, &[1; 4]));
    assert_panics("namespace of RowSlot(0)", || manager().probe_from(A, OTHER, &[1; 4], 4));
    assert_panics("namespace of RowSlot(0)", || {
        let mut kv = manager();
        kv.close(A);
        kv.open(A, Namespace(0));
        kv.probe_from(A, OTHER, &[1; 4], 4)
    });
}

#[test]
fn only_own_full_blocks_are_shared() {
    manager().share(A, KEY, &[1; 6], 3, StepId(2));
    assert_panics("has not 4 blocks", || manager().share(A, KEY, &[1; 8], 4, StepId(2)));
    assert_panics("the tokens of every block", || manager().share(A, KEY, &[1; 5], 3, StepId(2)));
}

#[test]
fn a_block_shared_for_a_committed_step_is_certain_at_once() {
    let mut kv = manager();
    kv.step_committed(StepId(2));
    kv.share(A, KEY, &[1; 6], 3, StepId(1));
    assert_eq!(kv.pending_step(A), None);
    kv.step_failed(StepId(3));
    assert_eq!(kv.num_shared(A), 3);
}

#[test]
fn steps_commit_once_and_do_not_fail_after() {
    manager().step_committed(StepId(2));
    assert_panics("commits after StepId(1)", || manager().step_committed(StepId(1)));
    manager().step_failed(StepId(2));
    assert_panics("has committed", || manager().step_failed(StepId(1)));
}

#[test]
fn a_table_has_an_end() {
    let mut kv = KvManager::new(&CoreConfig { max_model_len: 5, ..small(8, 2) });
    kv.open(A, Namespace(0));
    kv.open(B, Namespace(0));
    kv.allocate(A, 3).expect("room");
    assert_panics("is full with 3 blocks", || kv.clone().allocate(A, 1));
    kv.allocate(B, 3).expect("room");
    assert_eq!((kv.table(A), kv.table(B)), (&[0, 1, 2][..], &[3, 4, 5][..]));
    assert_eq!(kv.block_tables().len(), 4 * 3);
}

#[test]
fn shared_blocks_are_never_written() {
    assert_panics("is shared and must not be written", || manager().copy_on_write(A, 1));
    assert_panics("none at 3", || manager().copy_on_write(A, 3));
    assert_eq!(manager().copy_on_write(A, 2), Ok(None));
}

#[test]
fn a_path_is_adopted_while_it_lasts() {
    let probed = || {
        let mut kv = manager();
        kv.open(B, Namespace(0));
        let probe = kv.probe(KEY, &[2; 5], 4);
        assert_eq!(probe, Probe { num_blocks: 2, num_cached: 2 });
        kv
    };
    // These leave it.
    let mut kv = probed();
    kv.open(RowSlot(2), Namespace(0));
    kv.step_committed(StepId(2));
    assert_eq!(kv.allocate(A, 9).map_err(|error| error.requested), Err(9));
    kv.adopt(B);
    kv.check();
    assert_eq!(kv.table(B), [0, 1]);
    // Adopting uses it up, and every change of a block ends it.
    let changes: [fn(&mut KvManager); 8] = [
        |kv| kv.adopt(B),
        |kv| kv.allocate(B, 1).expect("room"),
        |kv| kv.close(A),
        |kv| kv.share(A, KEY, &[1; 6], 3, StepId(3)),
        |kv| kv.fork(A, B),
        |kv| kv.reset(),
        |kv| kv.step_failed(StepId(3)),
        |kv| {
            kv.fork(A, B);
            kv.probe(KEY, &[2; 5], 4);
            kv.copy_on_write(B, 2).expect("room");
        },
    ];
    for change in changes {
        let mut kv = probed();
        change(&mut kv);
        assert_panics("a probe since blocks last changed", || kv.clone().probe_tail());
        assert_panics("a probe since blocks last changed", || kv.clone().probe_next_hash());
        assert_panics("a probe since blocks last changed", || kv.adopt(B));
    }
    assert_panics("blocks of RowSlot(0) before it adopts", || probed().adopt(A));
    assert_panics("the slot that was probed", || {
        let mut kv = probed();
        kv.probe_from(A, KEY, &[1; 4], 4);
        kv.adopt(B);
    });
    assert_panics("broken chain adopts", || {
        let mut kv = manager();
        kv.open(B, Namespace(0));
        kv.reset();
        kv.open(RowSlot(2), Namespace(0));
        kv.allocate(RowSlot(2), 1).expect("room");
        kv.share(RowSlot(2), KEY, &[3; 2], 1, StepId(2));
        kv.probe(KEY, &[3; 3], 2);
        kv.adopt(B);
    });
}

#[test]
fn out_of_blocks_says_what_there_is() {
    let error = manager().allocate(A, 6).expect_err("five are available");
    assert_eq!(error, OutOfBlocks { requested: 6, free: 3, cached: 2 });
    let text = "6 blocks wanted, 3 are free and 2 cached; end or preempt a sequence";
    assert_eq!(error.to_string(), text);
}

/// Three prompts of two blocks in a pool of six, closed in every order; the first closed is used again.
#[test]
fn what_is_unused_for_longest_is_evicted_first() {
    const SLOTS: [RowSlot; 3] = [RowSlot(0), RowSlot(1), RowSlot(2)];
    let tokens = |prompt: usize| [prompt as Token; 4];
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut kv = KvManager::new(&small(6, 2));
        for (prompt, slot) in SLOTS.into_iter().enumerate() {
            kv.open(slot, Namespace(0));
            kv.allocate(slot, 2).expect("room");
            kv.share(slot, KEY, &tokens(prompt), 2, StepId(1));
        }
        for prompt in order {
            kv.close(SLOTS[prompt]);
        }
        let [first, second, third] = order;
        kv.open(A, Namespace(0));
        kv.probe(KEY, &tokens(first), 4);
        kv.adopt(A);
        kv.close(A);
        kv.open(B, Namespace(0));
        // The end of a prompt goes before its beginning.
        for (left, num_left) in [(second, 1), (second, 0), (third, 1), (third, 0), (first, 1)] {
            kv.allocate(B, 1).expect("room");
            for prompt in 0..3 {
                let found = kv.probe(KEY, &tokens(prompt), 4).num_blocks;
                let is_gone =
                    prompt == second && left != second || prompt == third && left == first;
                let want = if prompt == left {
                    num_left
                } else if is_gone {
                    0
                } else {
                    2
                };
                assert_eq!(found, want, "prompt {prompt} of {order:?} with {left} at {num_left}");
            }
        }
    }
}

#[test]
fn events_are_off_by_default() {
    let mut kv = KvManager::new(&CoreConfig { enable_block_events: false, ..small(8, 2) });
    kv.open(A, Namespace(0));
    kv.allocate(A, 1).expect("room");
    kv.share(A, KEY, &[1; 2], 1, StepId(1));
    let mut events = vec![crate::BlockEvent::Cleared];
    kv.take_events(&mut events);
    assert_eq!(events, []);
    assert_eq!(kv.snapshot().iter().map(|info| info.hash).collect::<Vec<_>>(), [None]);
}

/// Two slots with long tables that part at every possible block, in the shared part or after it.
#[test]
fn leading_blocks_are_counted_wherever_tables_part() {
    let config = CoreConfig { max_model_len: 40, ..small(120, 1) };
    for num_common in 0..20 {
        for num_shared in [0, 1, 5, 19, 20] {
            let mut kv = KvManager::new(&config);
            let tokens = |last: Token| {
                let mut tokens: Vec<Token> = (0..20).collect();
                tokens[num_common..].fill(last);
                tokens
            };
            kv.open(A, Namespace(0));
            kv.allocate(A, 20).expect("room");
            kv.share(A, KEY, &tokens(77), num_shared, StepId(1));
            kv.open(B, Namespace(0));
            kv.probe(KEY, &tokens(88), num_common);
            kv.adopt(B);
            kv.allocate(B, 20 - kv.num_blocks_of(B)).expect("room");
            kv.share(B, KEY, &tokens(88), 20, StepId(1));
            let common = num_common.min(num_shared);
            for limit in 0..25 {
                assert_eq!(kv.num_shared_leading(A, B, limit), common.min(limit));
                assert_eq!(kv.num_shared_leading(B, A, limit), common.min(limit));
                assert_eq!(kv.num_shared_leading(A, A, limit), limit.min(20));
            }
        }
    }
}

#[test]
fn check_notices_every_broken_invariant() {
    let broken = |change: fn(&mut KvManager)| {
        move || {
            let mut kv = manager();
            change(&mut kv);
            kv.check();
        }
    };
    assert_panics("uses of BlockId(2)", broken(|kv| kv.pool.retain(BlockId(2))));
    assert_panics("uses of BlockId(4)", broken(|kv| kv.tables[2] = 7));
    assert_panics(
        "free count",
        broken(|kv| kv.pool.set_state(BlockId(7), BlockState::Cached { last_use: 0 })),
    );
    assert_panics("RowSlot(0): Slot", broken(|kv| kv.slots[0].num_shared = 4));
    assert_panics("closed RowSlot(0)", broken(|kv| kv.slots[0].is_open = false));
    assert_panics("BlockId(4) of RowSlot(0) is a node", broken(|kv| kv.slots[0].num_shared = 3));
    assert_panics("parent of BlockId(3) of RowSlot(0)", broken(|kv| kv.tables.swap(0, 1)));
    assert_panics("namespace of BlockId(2)", broken(|kv| kv.slots[0].namespace = Namespace(1)));
    assert_panics("place of BlockId(1) in the heap", broken(|kv| kv.lru.clear()));
    assert_panics(
        "place of BlockId(1) in the heap",
        broken(|kv| {
            kv.pool.evict(BlockId(1));
        }),
    );
    assert_panics(
        "free BlockId(1) is not a node",
        broken(|kv| {
            kv.lru.remove(BlockId(1));
            kv.pool.evict(BlockId(1));
        }),
    );
    assert_panics(
        "cached BlockId(1) is a node",
        broken(|kv| {
            kv.lru.remove(BlockId(1));
            kv.tree.remove(BlockId(1));
            kv.insert_if_evictable(BlockId(0));
        }),
    );
    assert_panics(
        "was used after its parent",
        broken(|kv| {
            kv.lru.remove(BlockId(1));
            kv.pool.set_state(BlockId(1), BlockState::Cached { last_use: 2 });
            kv.lru.insert(BlockId(1), 2);
        }),
    );
    assert_panics(
        "its parent BlockId(0) Cached",
        broken(|kv| {
            kv.open(B, Namespace(0));
            kv.tables[kv.max_blocks_per_seq] = 1;
            kv.slots[1].num_blocks = 1;
            kv.pool.retain(BlockId(1));
            kv.lru.remove(BlockId(1));
        }),
    );
}
