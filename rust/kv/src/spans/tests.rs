use super::*;

fn span(start: u32, end: u32, digest: u128) -> Span {
    Span { start, end, digest }
}

#[test]
fn lists_hold_what_was_stored_and_give_it_back() {
    let mut arena = SpanArena::new(2);
    let (a, b) = ([span(0, 3, 1), span(3, 9, 2), span(12, 13, 3)], [span(5, 6, 7)]);
    let first = arena.store(&a);
    let second = arena.store(&b);
    let empty = arena.store(&[]);
    assert_eq!(empty, SpanList::default());
    assert_eq!(arena.iter(first).copied().collect::<Vec<_>>(), a);
    assert!(arena.equals(first, &a) && arena.equals(second, &b) && arena.equals(empty, &[]));
    for other in [&a[..2], &a[1..], &b, &[], &[a[0], a[1], span(12, 13, 4)]] {
        assert!(!arena.equals(first, other), "{other:?}");
    }
    assert_eq!(arena.num_live(), 4);

    arena.release(first);
    arena.release(empty);
    assert_eq!(arena.num_live(), 1);
    assert!(arena.equals(second, &b));

    // Cells that were given back are used again.
    let third = arena.store(&a[1..]);
    assert_eq!((arena.num_live(), arena.cells.len()), (3, 4));
    assert!(arena.equals(third, &a[1..]) && arena.equals(second, &b));
    arena.release(second);
    arena.release(third);
    assert_eq!(arena.num_live(), 0);
    let all = arena.store(&[a[0], a[1], a[2], b[0]]);
    assert_eq!((arena.num_live(), arena.cells.len()), (4, 4));
    assert_eq!(arena.iter(all).count(), 4);
    arena.clear();
    assert_eq!(arena.num_live(), 0);
    let after = arena.store(&a);
    assert_eq!((arena.num_live(), arena.cells.len()), (3, 3));
    assert!(arena.equals(after, &a));
}

#[test]
fn overlap_is_at_least_one_token() {
    let spans = [span(0, 4, 1), span(5, 8, 2), span(8, 9, 3), span(11, 30, 4), span(30, 31, 5)];
    let block = [0; 4];
    let digests = |index| {
        let overlapping = overlapping(&spans, index, &block);
        overlapping.iter().map(|span| span.digest).collect::<Vec<_>>()
    };
    assert_eq!(digests(0), [1]);
    assert_eq!(digests(1), [2]);
    assert_eq!(digests(2), [3, 4]);
    assert_eq!(digests(3), [4]);
    assert_eq!(digests(7), [4, 5]);
    assert_eq!(digests(8), [0_u128; 0]);
    assert!(overlapping(&[], 0, &block).is_empty());
}
