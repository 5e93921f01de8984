//! Random walks.

use fastserve_base::{CoreConfig, Namespace, Span};
use proptest::collection::vec;
use proptest::prelude::*;

use super::model::Content;
use super::pair::{Op, Pair};
use super::{NUM_SLOTS, small};

/// Tokens, namespaces and spans from a few, so that prefixes meet and part.
fn content() -> impl Strategy<Value = Content> {
    let tokens = vec(prop_oneof![6 => Just(0), 1 => Just(1), 1 => Just(2)], 0..18);
    let namespace = prop_oneof![4 => Just(Namespace(0)), 1 => Just(Namespace(1 << 70))];
    let some_spans = vec((0..4_u32, 1..6_u32, 0..2_u128), 1..4).prop_map(|spans| {
        let mut position = 0;
        let place = |(gap, len, digest)| {
            let start = position + gap;
            position = start + len;
            Span { start, end: position, digest }
        };
        spans.into_iter().map(place).collect()
    });
    let spans = prop_oneof![3 => Just(vec![]), 1 => some_spans];
    (namespace, tokens, spans).prop_map(|(namespace, tokens, spans)| Content {
        namespace,
        tokens,
        spans,
    })
}

pub(super) fn op() -> impl Strategy<Value = Op> {
    let slot = || 0..NUM_SLOTS;
    prop_oneof![
        12 => (slot(), content()).prop_map(|(slot, content)| Op::Open(slot, content)),
        16 => (slot(), 0..20_usize).prop_map(|(slot, max)| Op::Adopt(slot, max)),
        6 => (content(), 0..20_usize).prop_map(|(content, max)| Op::Probe(content, max)),
        16 => (slot(), 0..5_usize).prop_map(|(slot, n)| Op::Allocate(slot, n)),
        18 => (slot(), 1..9_usize).prop_map(|(slot, n)| Op::Share(slot, n)),
        8 => (slot(), vec(0..2_u32, 1..5)).prop_map(|(slot, tokens)| Op::Generate(slot, tokens)),
        4 => (slot(), 0..9_usize).prop_map(|(slot, index)| Op::CopyOnWrite(slot, index)),
        8 => (slot(), slot()).prop_map(|(from, to)| Op::Fork(from, to)),
        12 => slot().prop_map(Op::Close),
        8 => Just(Op::Plan),
        6 => Just(Op::Commit),
        2 => (0..4_usize).prop_map(Op::Fail),
        1 => Just(Op::Reset),
    ]
}

pub(super) fn walk(config: &CoreConfig, hash_mask: u64, ops: &[Op]) {
    let mut pair = Pair::new(config, hash_mask);
    pair.compare();
    for op in ops {
        pair.apply(op);
    }
    for slot in 0..NUM_SLOTS {
        pair.apply(&Op::Close(slot));
    }
    let counts = pair.kv.counts();
    assert_eq!((counts.held, counts.free + counts.cached), (0, counts.capacity), "idle");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn manager_agrees_with_the_model(ops in vec(op(), 0..120), num_blocks in 1..14_u32) {
        walk(&small(num_blocks, 2), u64::MAX, &ops);
    }

    #[test]
    fn larger_blocks_agree_too(ops in vec(op(), 0..120), num_blocks in 1..8_u32) {
        walk(&small(num_blocks, 4), u64::MAX, &ops);
    }

    #[test]
    fn collisions_change_nothing(
        ops in vec(op(), 0..120),
        num_blocks in 1..14_u32,
        mask in prop_oneof![Just(0), Just(1_u64 << 63), Just(u64::MAX >> 32), Just(5_u64 << 58)],
    ) {
        walk(&small(num_blocks, 2), mask, &ops);
    }

    #[test]
    fn nothing_is_cached_where_caching_is_off(ops in vec(op(), 0..80), num_blocks in 1..14_u32) {
        let config = CoreConfig { enable_prefix_caching: false, ..small(num_blocks, 2) };
        walk(&config, u64::MAX, &ops);
    }
}
