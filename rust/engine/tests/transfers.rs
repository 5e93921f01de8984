//! Copies to and from another tier: held while under way, cached or free when done.

mod driver;

use driver::{Driver, request, small};
use fastserve_base::{CoreConfig, Namespace, Ticket};
use fastserve_engine::TransferError;

const PREFIX: [u32; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
const ANY: Namespace = Namespace(0);

/// A core that has served [`PREFIX`] and one token more: 4 blocks are cached.
fn served() -> Driver {
    let mut driver = Driver::new(small());
    driver.submit(request(1, &[1, 2, 3, 4, 5, 6, 7, 8, 9], 1));
    driver.run_to_end(3);
    driver
}

#[test]
fn offloading_holds_the_blocks_until_it_is_completed() {
    let mut driver = served();
    let out = driver.core.offload(ANY, &PREFIX, 1, &[100, 101, 102, 103]).expect("cached");
    assert_eq!((out.first_block, out.num_blocks), (1, 3));
    assert!(driver.core.is_open(out.ticket));
    assert_eq!(driver.core.stats().held, 4, "the path is held");
    assert!(!driver.core.complete(out.ticket, true), "no plan lists it yet");
    assert!(driver.core.has_work());

    let sizes = driver.plan();
    assert!(sizes.is_step());
    assert_eq!((sizes.num_rows, sizes.num_copies), (0, 3));
    let listed: Vec<_> = driver.view().copies_out().to_vec();
    let places: Vec<i32> = listed.chunks(4).map(|copy| copy[1]).collect();
    assert_eq!(places, [100, 101, 102]);
    assert!(listed.chunks(4).all(|copy| copy[2..] == [out.ticket.0 as i32, 0]));
    assert!(driver.core.complete(out.ticket, true));
    assert_eq!(driver.core.stats().held, 4, "a step in flight names them");
    assert!(!driver.core.complete(out.ticket, true), "once");
    driver.commit();
    let stats = driver.core.stats();
    assert_eq!((stats.held, stats.cached, stats.num_offloaded_blocks), (0, 4, 3));
    assert!(!driver.core.is_open(out.ticket) && !driver.core.has_work());
}

#[test]
fn a_fetched_prefix_is_matched_and_waited_for() {
    for ok in [true, false] {
        let mut driver = Driver::new(small());
        let fetched = driver.core.fetch(ANY, &PREFIX, &[7, 8, 9, 10]).expect("room");
        assert_eq!((fetched.first_block, fetched.num_blocks), (0, 4));
        let wanted = request(1, &[1, 2, 3, 4, 5, 6, 7, 8, 9], 2);
        driver.submit(wanted.clone());
        let other = request(2, &[9, 9, 9], 2);
        driver.submit(other.clone());
        assert_eq!(driver.plan().num_rows, 1, "the first waits for the ticket, the second runs");
        let blocks: Vec<i32> = driver.view().copies_in().chunks(4).map(|copy| copy[1]).collect();
        assert_eq!(blocks, [7, 8, 9, 10]);
        driver.commit();
        driver.step();
        assert_eq!(driver.core.stats().num_waiting, 1);
        assert!(driver.core.complete(fetched.ticket, ok));
        driver.run_to_end(5);
        driver.assert_exact(&wanted);
        driver.assert_exact(&other);
        let stats = driver.core.stats();
        assert_eq!(driver.ended(1).num_cached_tokens, if ok { 8 } else { 0 });
        assert_eq!(stats.num_fetched_blocks, if ok { 4 } else { 0 });
        assert_eq!(stats.num_failed_transfers, u64::from(!ok));
    }
}

#[test]
fn only_what_is_missing_is_fetched() {
    let mut driver = served();
    let more = [1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22, 23];
    let fetched = driver.core.fetch(ANY, &more, &[0, 1, 2, 3, 4, 5]).expect("room");
    assert_eq!((fetched.first_block, fetched.num_blocks), (4, 2));
    driver.plan();
    let places: Vec<i32> = driver.view().copies_in().chunks(4).map(|copy| copy[1]).collect();
    assert_eq!(places, [4, 5]);
    driver.commit();
    assert!(driver.core.is_open(fetched.ticket) && !driver.core.has_work(), "it is under way");
    assert!(driver.core.complete(fetched.ticket, true));
    assert_eq!(driver.core.stats().cached, 6);
}

#[test]
fn refusals_say_why() {
    let mut driver = served();
    let message = |error: TransferError| error.to_string();
    let core = &mut driver.core;
    assert_eq!(
        message(core.offload(ANY, &[5, 5], 0, &[1]).expect_err("unknown")),
        "no block to copy: the prefix is not cached that far"
    );
    assert!(core.offload(ANY, &PREFIX, 4, &[1]).is_err(), "four blocks are cached, 0 to 3");
    assert_eq!(
        message(core.fetch(ANY, &PREFIX, &[1, 2, 3, 4]).expect_err("all here")),
        "no block to copy: all are cached"
    );
    assert_eq!(
        message(core.fetch(ANY, &PREFIX, &[1]).expect_err("one place")),
        "1 places for 4 whole blocks of tokens; give one a block"
    );
    assert_eq!(
        message(core.fetch(ANY, &[1; 41], &[0; 20]).expect_err("too long")),
        "41 tokens, a sequence has at most max_model_len=40"
    );
    assert!(!core.complete(Ticket(99), true));
    assert_eq!(core.stats().held, 0, "nothing changed");

    let tiny = CoreConfig { num_blocks: 4, watermark_blocks: 1, max_num_tickets: 1, ..small() };
    let mut driver = Driver::new(tiny.clone());
    driver.core.fetch(ANY, &PREFIX[..6], &[0; 3]).expect("three beside the watermark");
    let mut driver = Driver::new(tiny);
    assert_eq!(
        message(driver.core.fetch(ANY, &PREFIX, &[0; 4]).expect_err("one more")),
        "4 blocks wanted, 3 are free or cached beside the watermark; compute instead"
    );
    driver.core.fetch(ANY, &PREFIX[..2], &[0]).expect("room");
    assert_eq!(
        message(driver.core.fetch(ANY, &PREFIX[2..4], &[0]).expect_err("one ticket")),
        "1 copies are under way (max_num_tickets); complete one first"
    );
    let mut driver = Driver::new(CoreConfig { enable_prefix_caching: false, ..small() });
    assert_eq!(
        message(driver.core.fetch(ANY, &PREFIX, &[0; 4]).expect_err("off")),
        "no block to copy: prefix caching is off"
    );
    driver.core.close();
    assert_eq!(
        message(driver.core.fetch(ANY, &PREFIX, &[0; 4]).expect_err("closed")),
        "the core is closed; make a new one"
    );
}

#[test]
fn a_failed_step_lists_its_copies_again() {
    let mut driver = served();
    let out = driver.core.offload(ANY, &PREFIX, 0, &[0, 1, 2, 3]).expect("cached");
    driver.plan();
    driver.fail();
    assert!(driver.core.is_open(out.ticket));
    assert_eq!(driver.plan().num_copies, 4, "again");
    assert!(driver.core.complete(out.ticket, true));
    driver.fail();
    assert!(!driver.core.is_open(out.ticket), "completed for a step that never ran");
    assert_eq!(driver.core.stats().num_failed_transfers, 1);
    assert_eq!(driver.core.stats().held, 0);
}

#[test]
fn a_copy_of_a_block_that_a_failed_step_was_to_write_ends_as_failed() {
    let mut driver = Driver::new(small());
    driver.submit(request(1, &[1, 2, 3, 4, 5, 6, 7, 8, 9], 2));
    driver.plan();
    let out = driver.core.offload(ANY, &PREFIX, 0, &[0, 1, 2, 3]).expect("planned, so shared");
    driver.fail();
    assert!(!driver.core.is_open(out.ticket));
    assert_eq!(driver.core.stats().num_failed_transfers, 1);
    driver.run_to_end(5);
    driver.assert_exact(&request(1, &[1, 2, 3, 4, 5, 6, 7, 8, 9], 2));
}

#[test]
fn closing_ends_copies_that_no_plan_lists_and_waits_for_the_others() {
    let mut driver = served();
    let listed = driver.core.offload(ANY, &PREFIX, 0, &[0, 1]).expect("cached");
    driver.plan();
    driver.commit();
    let unlisted = driver.core.offload(ANY, &PREFIX, 0, &[0, 1, 2, 3]).expect("cached");
    driver.core.close();
    driver.core.check();
    assert!(driver.core.is_open(listed.ticket) && !driver.core.is_open(unlisted.ticket));
    assert_eq!(driver.core.stats().held, 2);
    assert!(driver.core.complete(listed.ticket, false));
    assert_eq!(driver.core.stats().held, 0);
}

#[test]
fn many_copies_are_listed_over_several_steps() {
    let config = CoreConfig { max_num_seqs: 1, ..small() };
    let mut driver = Driver::new(config);
    let tokens: Vec<u32> = (0..16).collect();
    let fetched = driver.core.fetch(ANY, &tokens, &[9; 8]).expect("room");
    let mut listed = Vec::new();
    while driver.core.has_work() {
        listed.push(driver.plan().num_copies);
        assert_eq!(driver.core.complete(fetched.ticket, true), listed.len() == 4);
        driver.commit();
    }
    assert_eq!(listed, [2, 2, 2, 2], "two a row and step");
    assert_eq!(driver.core.stats().cached, 8);
}

#[test]
fn a_copy_listed_in_part_can_be_completed_after_the_end() {
    let mut driver = Driver::new(CoreConfig { max_num_seqs: 1, ..small() });
    let tokens: Vec<u32> = (0..16).collect();
    let fetched = driver.core.fetch(ANY, &tokens, &[9; 8]).expect("room");
    assert_eq!(driver.plan().num_copies, 2, "of eight");
    driver.core.close();
    assert!(driver.core.complete(fetched.ticket, true));
    assert_eq!(driver.core.stats().held, 8, "a step in flight names them");
    driver.commit();
    let stats = driver.core.stats();
    assert_eq!((stats.held, stats.cached, stats.num_failed_transfers), (0, 0, 1));
}

#[test]
fn a_reset_does_not_hide_that_a_copys_source_was_never_written() {
    // Found by the simulator, seed 14841 with 4 steps in flight.
    let mut driver = Driver::new(CoreConfig { max_num_steps_in_flight: 2, ..small() });
    driver.submit(request(1, &[1, 2, 3, 4, 5, 6, 7, 8, 9], 2));
    driver.plan();
    let out = driver.core.offload(ANY, &PREFIX, 0, &[0, 1, 2, 3]).expect("planned, so shared");
    driver.core.reset_prefix_cache();
    driver.fail();
    assert!(!driver.core.is_open(out.ticket));
    assert_eq!(driver.core.stats().num_failed_transfers, 1);
}
