//! Aborts and closing, with steps in flight.

use fastserve_base::CoreConfig;
use fastserve_engine::Lifecycle;

use crate::{Drive, request, sim, small, tokens};

/// With two steps in flight an aborted sequence ends at once, its blocks come back with the last step
/// that names them.
#[test]
fn blocks_come_back_when_the_last_step_that_names_them_has_committed() {
    let mut sim = sim(CoreConfig { max_num_steps_in_flight: 2, ..small() });
    sim.submit_all([request(0, tokens(1, 9), 9), request(1, tokens(2, 5), 9)]);
    assert!(sim.plan_one() && sim.plan_one());
    let check = sim.abort(0);
    sim.must(check);
    sim.commit_one();
    assert!(sim.plan_one());
    sim.commit_one();
    sim.commit_one();
    insta::assert_snapshot!(sim.trace.tail(usize::MAX), @r"
    step  free  held cached  event
       0    32     0      0  submit   r0 prompt=9 max_tokens=9 n=1
       0    32     0      0  submit   r1 prompt=5 max_tokens=9 n=1
       1    27     5      0  admit    r0.0 slot=0 match=0 take=9
       1    27     5      0  admit    r1.0 slot=1 match=0 take=5
       2    27     5      0  extend   r0.0 at=9 take=1
       2    27     5      0  extend   r1.0 at=5 take=1
       2    27     5      0  abort    r0
       2    27     5      0  commit   step 1
       2    27     5      0  finish   r0.0 abort outputs=1
       3    27     5      0  extend   r1.0 at=6 take=1
       3    28     2      2  commit   step 2
       3    28     2      2  commit   step 3
    ");
    sim.finish_all();
}

/// Closing with steps in flight ends every sequence; the blocks follow with the steps.
#[test]
fn closing_ends_everything_and_the_steps_in_flight_may_follow() {
    let mut sim = sim(CoreConfig { max_num_steps_in_flight: 2, ..small() });
    sim.submit_all((0..3).map(|id| request(id, tokens(id as u32 + 1, 5), 9)));
    assert!(sim.plan_one() && sim.plan_one());
    let check = sim.lifecycle(Lifecycle::Closed);
    sim.must(check);
    assert!(sim.ledger.live.is_empty());
    sim.commit_one();
    sim.commit_one();
    sim.must(sim.check_end());
}
