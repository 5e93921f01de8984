//! Every fault planted in this crate is noticed by the random walks.
#![cfg(feature = "faults")]

use fastserve_base::fault::{Fault, plant};
use proptest::collection::vec;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use super::small;
use super::walk::{op, walk};
use crate::test_support::panics;

#[test]
fn walks_notice_every_planted_fault() {
    for fault in [
        Fault::PartialBlockMatched,
        Fault::HashTakenForEquality,
        Fault::NamespaceIgnored,
        Fault::EpochIgnored,
        Fault::CopyOnWriteSkipped,
        Fault::UseCountOffByOne,
        Fault::SpanDigestIgnored,
    ] {
        let mut runner = TestRunner::deterministic();
        let walks = vec(op(), 60..120);
        let is_noticed = (0..100).any(|_| {
            let ops = walks.new_tree(&mut runner).expect("ops").current();
            walk(&small(12, 2), u64::MAX, &ops);
            plant(Some(fault));
            let panicked = panics(|| walk(&small(12, 2), u64::MAX, &ops)).is_some();
            plant(None);
            panicked
        });
        assert!(is_noticed, "{fault:?}");
    }
}
