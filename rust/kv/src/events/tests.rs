//! Hashes come from Python's `hashlib`, fed with the bytes that the module header lists.

use fastserve_base::Span;

use super::*;

fn hash(parent: Option<ChainHash>, namespace: u128, tokens: &[u32], spans: &[Span]) -> ChainHash {
    let namespace = Namespace(namespace);
    chain_hash(parent, &BlockKey { parent: None, namespace, tokens, spans, hash: 0 })
}

#[test]
fn chain_hash_is_the_documented_one() {
    let first = hash(None, 7 << 64 | 9, &(1..17).collect::<Vec<_>>(), &[]);
    assert_eq!(format!("{:032x}", first.0), "672a21d4cf052962419c9ed1987c7474");
    let spans =
        [Span { start: 3, end: 40, digest: 5 << 64 | 6 }, Span { start: 40, end: 41, digest: 1 }];
    let second = hash(Some(first), 0, &(100..116).collect::<Vec<_>>(), &spans);
    assert_eq!(format!("{:032x}", second.0), "8699ab6982c11c689a345fd964864702");
}

#[test]
fn later_blocks_do_not_repeat_the_namespace() {
    let parent = Some(ChainHash(1));
    assert_eq!(hash(parent, 1, &[1], &[]), hash(parent, 2, &[1], &[]));
    assert_ne!(hash(None, 1, &[1], &[]), hash(None, 2, &[1], &[]));
    assert_ne!(hash(None, 1, &[1], &[]), hash(parent, 1, &[1], &[]));
}

#[test]
fn take_leaves_nothing_behind() {
    let mut log = EventLog::new(2);
    log.cleared();
    let mut events = Vec::new();
    log.take(&mut events);
    assert_eq!(events, [BlockEvent::Cleared]);
    events.clear();
    log.take(&mut events);
    assert_eq!(events, []);
}
