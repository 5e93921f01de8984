//! What other threads are handed stays within the room made for it at construction.

use fastserve_base::{CoreConfig, Request, RequestId};

use crate::core::Core;
use crate::outputs::{Results, StepOutputs};

#[test]
fn what_has_ended_and_nobody_came_to_free_does_not_pile_up() {
    let config =
        CoreConfig { max_num_seqs: 2, max_num_queued_requests: 2, ..CoreConfig::default() };
    let mut core = Core::new(config).expect("the configuration is good");
    let inbox = core.inbox();
    let mut arena = vec![0; core.layout().words];
    let room = core.shared.state().retired.capacity();
    for id in 0..2 {
        inbox.submit(Request::new(RequestId(id), vec![1], 1)).expect("the request is good");
    }
    let first = core.plan(1, &mut arena).expect("a step can be planned");
    for id in 2..4 {
        inbox.submit(Request::new(RequestId(id), vec![1], 1)).expect("the request is good");
    }
    let results = Results { counts: &[1; 2], tokens: &[5; 2] };
    core.commit(first.step, 2, results).expect("the results fit");
    let second = core.plan(3, &mut arena).expect("a step can be planned");
    core.commit(second.step, 4, results).expect("the results fit");
    let mut outputs = StepOutputs::default();
    core.take_outputs(&mut outputs);
    assert_eq!((outputs.len(), core.has_work()), (4, false));
    // Each leaves its request and a vector of tokens.
    let state = core.shared.state();
    assert_eq!((state.retired.len(), state.retired.capacity()), (room, room));
}
