//! Every sequence of up to five operations of two sequences on three blocks.

use fastserve_base::Namespace;

use super::model::Content;
use super::pair::{Op, Pair};
use super::small;

fn content(tokens: &[u32]) -> Content {
    Content { namespace: Namespace(0), tokens: tokens.to_vec(), spans: vec![] }
}

fn all_ops() -> Vec<Op> {
    let mut ops = vec![Op::Commit, Op::Fail(0), Op::Reset];
    for slot in 0..2 {
        ops.push(Op::Open(slot, content(&[7, 7, 8])));
        ops.push(Op::Open(slot, content(&[7, 9])));
        ops.push(Op::Adopt(slot, 2));
        ops.push(Op::Allocate(slot, 1));
        ops.push(Op::Allocate(slot, 2));
        ops.push(Op::Share(slot, 3));
        ops.push(Op::CopyOnWrite(slot, 0));
        ops.push(Op::Fork(slot, 1 - slot));
        ops.push(Op::Close(slot));
    }
    ops
}

/// Apply every legal operation to `pair`, and go on from each. Returns how many histories that was.
fn explore(pair: &Pair, ops: &[Op], depth: u32) -> u64 {
    if depth == 0 {
        return 1;
    }
    let follow = |op| {
        let mut next = pair.clone();
        if next.apply(op) { explore(&next, ops, depth - 1) } else { 0 }
    };
    1 + ops.iter().map(follow).sum::<u64>()
}

#[test]
fn every_short_history() {
    let num_histories = explore(&Pair::new(&small(3, 1), u64::MAX), &all_ops(), 5);
    assert!(num_histories > 50_000, "{num_histories} histories");
}

/// The same from a full pool: two prefixes cached, one of two blocks and one of one.
#[test]
fn every_short_history_of_a_full_pool() {
    let mut pair = Pair::new(&small(3, 1), u64::MAX);
    for op in [
        Op::Open(0, content(&[7, 7, 8])),
        Op::Allocate(0, 2),
        Op::Share(0, 2),
        Op::Open(1, content(&[7, 9])),
        Op::Adopt(1, 2),
        Op::Allocate(1, 1),
        Op::Share(1, 2),
        Op::Close(0),
        Op::Close(1),
    ] {
        assert!(pair.apply(&op), "{op:?}");
    }
    let num_histories = explore(&pair, &all_ops(), 4);
    assert!(num_histories > 5_000, "{num_histories} histories");
}
