//! Claims: who waits for whom.

use fastserve_base::{CoreConfig, Request, RequestId, RowSlot};

use crate::core::Core;
use crate::outputs::Results;

const LEADER: RowSlot = RowSlot(0);
const FOLLOWER: RowSlot = RowSlot(1);

/// Two prompts of which a chunk is computed each. They differ, but from now on the first claims the
/// block that the second computes next.
fn claimed(chunk: u32, len: usize) -> Core {
    let config = CoreConfig {
        block_size: 2,
        max_num_seqs: 2,
        max_chunk_tokens: Some(chunk),
        vocab_size: 10,
        ..CoreConfig::default()
    };
    let mut core = Core::new(config).expect("the configuration is good");
    let inbox = core.inbox();
    for (id, len) in [(1, 40), (2, len)] {
        inbox.submit(Request::new(RequestId(id), vec![id as u32; len], 1)).expect("it is good");
    }
    let sizes = plan(&mut core);
    assert_eq!((sizes, core.service.len()), (2 * chunk, 2));
    let claim = core.names[FOLLOWER.index()].claim;
    assert_ne!(claim, 0);
    core.claims.insert(claim, LEADER);
    core
}

/// Plan a step and commit it. Returns its tokens.
fn plan(core: &mut Core) -> u32 {
    let mut arena = vec![0; core.layout().words];
    let sizes = core.plan(1, &mut arena).expect("a step can be planned");
    let results = Results {
        counts: &[1; 2][..sizes.num_outputs as usize],
        tokens: &[5; 2][..sizes.num_outputs as usize],
    };
    core.commit(sizes.step, 2, results).expect("the results fit");
    core.check();
    sizes.num_tokens
}

#[test]
fn a_row_waits_for_a_block_that_it_can_match_and_has_not_begun() {
    for (chunk, len, tokens_of_follower) in [
        (2, 6, 0), // Its second block, which is not its last.
        (2, 4, 2), // Its last block: of that it must compute a token itself.
        (3, 8, 3), // It has begun its second block.
    ] {
        let mut core = claimed(chunk, len);
        assert_eq!(plan(&mut core), chunk + tokens_of_follower, "{chunk} of {len}");
    }
}

#[test]
fn a_claim_that_another_row_took_over_stays() {
    let mut core = claimed(2, 6);
    let claim = core.names[FOLLOWER.index()].claim;
    core.drop_claim(FOLLOWER);
    assert_eq!(core.claims.get(&claim), Some(&LEADER));
    core.names[LEADER.index()].claim = claim;
    core.drop_claim(LEADER);
    assert_eq!(core.claims.get(&claim), None);
}
