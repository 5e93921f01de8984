//! `check` notices each invariant broken: the tests of everything else rely on it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use fastserve_base::{CoreConfig, Request, RequestId, RowSlot};
use fastserve_sched::Status;
use fastserve_sched::rows::flags;

use crate::core::Core;
use crate::outputs::Results;

/// Two running sequences, one that has a step in flight and ends, and one that waits.
fn busy() -> Core {
    let config = CoreConfig {
        block_size: 2,
        num_blocks: 16,
        max_model_len: 16,
        max_num_seqs: 3,
        max_num_batched_tokens: 8,
        max_num_output_rows: 8,
        max_num_steps_in_flight: 2,
        vocab_size: 10,
        ..CoreConfig::default()
    };
    let mut core = Core::new(config).expect("the configuration is good");
    let inbox = core.inbox();
    for id in 1..=4 {
        let request = Request::new(RequestId(id), vec![id as u32; 2], 8);
        inbox.submit(request).expect("the request is good");
    }
    let mut arena = vec![0; core.layout().words];
    let sizes = core.plan(1, &mut arena).expect("a step can be planned");
    let results = Results { counts: &[1; 3], tokens: &[5; 3] };
    core.commit(sizes.step, 2, results).expect("the results fit");
    core.plan(3, &mut arena).expect("a step can be planned");
    inbox.abort(RequestId(3));
    core.plan(4, &mut arena).expect("a step can be planned");
    assert_eq!((core.leaving.len(), core.service.len()), (1, 2));
    core.check();
    core
}

/// The message of the panic after `breaking` a core.
fn broken(breaking: impl FnOnce(&mut Core)) -> String {
    let mut core = busy();
    breaking(&mut core);
    let caught = catch_unwind(AssertUnwindSafe(|| core.check())).expect_err("it is noticed");
    let text = caught.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| caught.downcast_ref::<&str>().copied()).expect("a message").to_owned()
}

/// The sequence in a slot.
fn in_slot(core: &Core, slot: u32) -> u32 {
    core.rows[RowSlot(slot).index()].sequence
}

#[test]
fn slots() {
    let twice = broken(|core| core.free_slots.push(RowSlot(0)));
    assert!(twice.contains("slot 0 is free, running or leaving"), "{twice}");
    let nowhere = broken(|core| core.leaving.clear());
    assert!(nowhere.contains("is free, running or leaving"), "{nowhere}");
    let open = broken(|core| {
        let slot = core.leaving.pop().expect("one leaves");
        core.free_slots.push(slot);
    });
    assert!(open.contains("is free and open"), "{open}");
}

#[test]
fn rows() {
    let table = broken(|core| core.rows[0].num_computed += 2);
    assert!(table.contains("table of"), "{table}");
    let tail = broken(|core| core.names[0].num_stored += 1);
    assert!(tail.contains("left == right"), "{tail}");
    let many = broken(|core| core.rows[0].num_pending = 0);
    assert!(many.contains("computed more than it has"), "{many}");
    let orders = broken(|core| core.order.retain(|slot| slot != RowSlot(0)));
    assert!(orders.contains("both orders list the same rows"), "{orders}");
}

#[test]
fn sequences() {
    let count = broken(|core| {
        let request = core.sequences[in_slot(core, 0)].request;
        core.requests[request].num_live += 1;
    });
    assert!(count.contains("sequences of request"), "{count}");
    let queued = broken(|core| core.num_queued_requests += 1);
    assert!(queued.contains("queued requests"), "{queued}");
    let tokens = broken(|core| core.num_queued_tokens += 1);
    assert!(tokens.contains("queued tokens"), "{tokens}");
    let ids = broken(|core| core.ids.clear());
    assert!(ids.contains("ids of live requests"), "{ids}");
}

#[test]
fn places() {
    let waits = broken(|core| {
        let waiting = core.sequences.iter().find(|(_, state)| state.status == Status::Waiting);
        let waiting = waiting.expect("one waits").0;
        core.waiting.remove(waiting);
    });
    assert!(waits.contains("waits nowhere"), "{waits}");
    // A leaving row is not looked at as a row, so only its sequence's place tells.
    let runs = broken(|core| {
        let sequence = in_slot(core, 1);
        core.sequences[sequence].status = Status::Running(RowSlot(2));
        core.rows[1].flags |= flags::LEAVING;
    });
    assert!(runs.contains("runs nowhere"), "{runs}");
    let settles = broken(|core| {
        let sequence = in_slot(core, 1);
        core.sequences[sequence].status = Status::Settling(RowSlot(1));
        core.rows[1].flags |= flags::LEAVING;
    });
    assert!(settles.contains("settles nowhere"), "{settles}");
    let elsewhere = broken(|core| {
        let sequence = in_slot(core, 1);
        let slot = core.leaving[0];
        core.sequences[sequence].status = Status::Settling(slot);
        core.rows[1].flags |= flags::LEAVING;
    });
    assert!(elsewhere.contains("settles nowhere"), "{elsewhere}");
}

#[test]
fn the_pool_and_the_orders() {
    let uses = broken(|core| core.kv.close(RowSlot(0)));
    assert!(!uses.is_empty());
    let transfers = broken(|core| {
        core.transfer_slots.pop();
    });
    assert!(transfers.contains("transfer slots"), "{transfers}");
}
