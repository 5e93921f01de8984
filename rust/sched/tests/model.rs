//! The heap, the queue and the orders against models that are too simple to be wrong.

use std::collections::BTreeMap;

use fastserve_base::RowSlot;
use fastserve_sched::heap::IndexedHeap;
use fastserve_sched::{OrderKey, PlanOrder, ServiceOrder, Slab, WaitQueue};
use proptest::collection::vec;
use proptest::prelude::*;

const ITEMS: u32 = 12;

#[derive(Debug, Clone)]
enum HeapOp {
    Push(u8, u32),
    Pop,
    Remove(u32),
}

fn heap_op() -> impl Strategy<Value = HeapOp> {
    prop_oneof![
        3 => (any::<u8>(), 0..ITEMS).prop_map(|(key, item)| HeapOp::Push(key, item)),
        1 => Just(HeapOp::Pop),
        2 => (0..ITEMS).prop_map(HeapOp::Remove),
    ]
}

proptest! {
    #[test]
    fn heap_agrees_with_a_sorted_map(ops in vec(heap_op(), 0..120), capacity in 0..14_usize) {
        let mut heap = IndexedHeap::with_capacity(capacity);
        let mut model: BTreeMap<u32, (u8, u32)> = BTreeMap::new();
        for op in ops {
            match op {
                HeapOp::Push(key, item) => {
                    model.entry(item).or_insert_with(|| {
                        heap.push((key, item), item);
                        (key, item)
                    });
                }
                HeapOp::Pop => {
                    let least = model.values().min().copied();
                    prop_assert_eq!(heap.pop(), least.map(|key| (key, key.1)));
                    if let Some((_, item)) = least {
                        model.remove(&item);
                    }
                }
                HeapOp::Remove(item) => {
                    prop_assert_eq!(heap.remove(item), model.remove(&item).is_some());
                }
            }
            heap.check();
            prop_assert_eq!(heap.len(), model.len());
            prop_assert_eq!(heap.is_empty(), model.is_empty());
            prop_assert_eq!(heap.peek(), model.values().min().map(|&key| (key, key.1)));
            for item in 0..ITEMS {
                prop_assert_eq!(heap.contains(item), model.contains_key(&item));
                prop_assert_eq!(heap.key(item), model.get(&item).copied());
            }
            let mut items: Vec<u32> = heap.items().collect();
            items.sort_unstable();
            prop_assert!(items.iter().eq(model.keys()));
        }
    }

    /// Ageing: whoever has waited long enough goes first, in order of arrival; the rest by rank.
    #[test]
    fn queue_agrees_with_sorting(
        ranks in vec(-3..3_i64, 1..20),
        waits in vec(0..40_u64, 1..20),
        max_wait in prop_oneof![Just(None), (1..60_u64).prop_map(Some)],
        removed in vec(0..20_u32, 0..4),
    ) {
        let mut queue = WaitQueue::new(4, max_wait);
        let mut model: Vec<(u32, i64, u64)> = Vec::new();
        let mut now = 0;
        for (number, (&rank, &wait)) in ranks.iter().zip(waits.iter().cycle()).enumerate() {
            now += wait;
            let number = number as u32;
            queue.push(OrderKey::new(rank, u64::from(number), 0), now, number);
            model.push((number, rank, now));
        }
        for sequence in removed {
            let at = model.iter().position(|entry| entry.0 == sequence);
            prop_assert_eq!(queue.remove(sequence), at.is_some());
            prop_assert!(!queue.contains(sequence));
            if let Some(at) = at {
                model.remove(at);
            }
        }
        now += 10;
        queue.age(now);
        queue.check();
        let aged = |since: u64| max_wait.is_some_and(|limit| now - since >= limit);
        model.sort_by_key(|&(number, rank, since)| {
            if aged(since) { (0, 0, number) } else { (1, rank, number) }
        });
        prop_assert_eq!(queue.len(), model.len());
        let mut sequences: Vec<u32> = queue.sequences().collect();
        sequences.sort_unstable();
        let mut numbers: Vec<u32> = model.iter().map(|entry| entry.0).collect();
        numbers.sort_unstable();
        prop_assert_eq!(sequences, numbers);
        for (number, _, since) in model {
            prop_assert!(!queue.is_empty());
            prop_assert!(queue.contains(number));
            let peeked = queue.peek();
            let popped = queue.pop();
            prop_assert_eq!(peeked, popped);
            let (key, sequence) = popped.expect("as many as the model");
            prop_assert_eq!(sequence, number);
            prop_assert_eq!(key.has_aged(), aged(since));
        }
        prop_assert!(queue.is_empty() && queue.pop().is_none());
        queue.check();
    }

    /// What neighbours share survives insertions and removals as a true lower bound, and exactly
    /// where every row stands beside the one it shares most with.
    #[test]
    fn plan_order_never_overstates(
        tables in vec(vec(0..2_u8, 6), 1..10),
        siblings in vec(0..10_usize, 10),
        removed in vec(any::<bool>(), 10),
    ) {
        let lcp = |a: RowSlot, b: RowSlot| {
            let (a, b) = (&tables[a.index()], &tables[b.index()]);
            a.iter().zip(b).take_while(|(x, y)| x == y).count() as u32
        };
        let mut order = PlanOrder::with_capacity(4);
        for (slot, &sibling) in siblings.iter().enumerate().take(tables.len()) {
            let sibling = (sibling < slot).then_some(RowSlot(sibling as u32));
            order.insert(RowSlot(slot as u32), sibling, lcp);
            if let Some(sibling) = sibling {
                let at = order.places().iter().position(|place| place.slot.index() == slot);
                let at = at.expect("it was inserted");
                prop_assert_eq!(order.places()[at - 1].slot, sibling);
                prop_assert_eq!(order.places()[at].num_shared, lcp(sibling, RowSlot(slot as u32)));
            }
        }
        for round in 0..2 {
            prop_assert!(order.places().first().is_none_or(|place| place.num_shared == 0));
            for pair in order.places().windows(2) {
                prop_assert!(pair[1].num_shared <= lcp(pair[0].slot, pair[1].slot));
            }
            if round == 0 {
                order.retain(|slot| !removed[slot.index()]);
                let kept = (0..tables.len()).filter(|&slot| !removed[slot]).count();
                prop_assert_eq!(order.places().len(), kept);
            }
        }
    }

    #[test]
    fn service_order_is_sorted(
        ranks in vec(0..4_i64, 0..20),
        removed in 0..20_u32,
        aged_before in 0..30_u64,
    ) {
        let mut order = ServiceOrder::with_capacity(2);
        let mut model = Vec::new();
        for (slot, &rank) in ranks.iter().enumerate() {
            let key = OrderKey::new(rank, slot as u64 / 2, slot as u32 % 2);
            order.insert(key, RowSlot(slot as u32), slot as u64);
            model.push((key, RowSlot(slot as u32)));
            order.check();
        }
        model.sort_unstable();
        let mut told = Vec::new();
        order.age(aged_before, |slot, key| told.push((key, slot)));
        order.age(aged_before, |_, _| unreachable!("they have aged"));
        for entry in &mut model {
            if u64::from(entry.1.0) <= aged_before {
                entry.0 = entry.0.aged();
                prop_assert!(told.contains(entry));
            }
        }
        model.sort_unstable();
        order.check();
        order.remove(RowSlot(removed));
        model.retain(|entry| entry.1 != RowSlot(removed));
        prop_assert!(order.slots().eq(model.iter().map(|entry| entry.1)));
        prop_assert_eq!(order.len(), model.len());
        prop_assert_eq!(order.is_empty(), model.is_empty());
        order.retain(|slot| slot.0 % 3 == 0);
        model.retain(|entry| entry.1.0 % 3 == 0);
        for (place, entry) in model.iter().enumerate() {
            prop_assert_eq!(order.slot(place), entry.1);
        }
        prop_assert_eq!(order.len(), model.len());
    }
}

/// The places that two removed rows leave share what all three pairs shared.
#[test]
fn removal_carries_the_least_shared() {
    let mut order = PlanOrder::with_capacity(4);
    let shared = |a: RowSlot, b: RowSlot| 10 - a.0.max(b.0);
    order.insert(RowSlot(0), None, shared);
    for slot in 1..5 {
        order.insert(RowSlot(slot), Some(RowSlot(slot - 1)), shared);
    }
    order.retain(|slot| slot.0 != 1 && slot.0 != 2);
    let left: Vec<_> = order.places().iter().map(|p| (p.slot.0, p.num_shared)).collect();
    assert_eq!(left, [(0, 0), (3, 7), (4, 6)]);
}

/// A sequence that came first and waits again since a short time: nobody who came later ages before it.
#[test]
fn ageing_follows_the_order_of_arrival() {
    let mut queue = WaitQueue::new(4, Some(50));
    queue.push(OrderKey::new(0, 1, 0), 100, 0);
    queue.push(OrderKey::new(5, 1, 1), 20, 1);
    queue.push(OrderKey::new(-5, 2, 0), 30, 2);
    queue.age(120);
    assert_eq!(queue.peek(), Some((OrderKey::new(-5, 2, 0), 2)));
    queue.age(150);
    let aged: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
    assert_eq!(aged.iter().map(|(_, sequence)| *sequence).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(aged.iter().all(|(key, _)| key.has_aged()));
}

#[test]
fn a_slab_gives_places_again_and_knows_what_is_in_use() {
    let mut slab = Slab::with_capacity(2);
    assert!(slab.is_empty());
    let places = ["a", "b", "c"].map(|value| slab.insert(value));
    assert_eq!(places, [0, 1, 2]);
    assert_eq!((slab.len(), slab.is_empty()), (3, false));
    assert_eq!(slab.remove(1), "b");
    assert_eq!((slab.get(0), slab.get(1), slab.get(9)), (Some(&"a"), None, None));
    assert_eq!(slab.iter().collect::<Vec<_>>(), [(0, &"a"), (2, &"c")]);
    *slab.get_mut(2).expect("in use") = "d";
    assert_eq!(slab.get_mut(1), None);
    assert_eq!(slab.get_mut(9), None);
    assert_eq!(slab.insert("e"), 1);
    assert_eq!(slab.iter().collect::<Vec<_>>(), [(0, &"a"), (1, &"e"), (2, &"d")]);
    assert_eq!(slab.len(), 3);
}

#[test]
#[should_panic(expected = "is in the heap")]
fn pushing_twice_is_a_bug() {
    let mut heap = IndexedHeap::with_capacity(2);
    heap.push(1, 0);
    heap.push(2, 0);
}
