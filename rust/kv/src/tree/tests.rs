//! The tree alone; the manager's tests drive it against a model.

use super::*;
use crate::test_support::assert_panics;

const BLOCK_SIZE: usize = 4;

fn tree() -> PrefixTree {
    tree_of(BLOCK_SIZE, 600)
}

fn tree_of(block_size: usize, num_blocks: u32) -> PrefixTree {
    let block_size = block_size as u32;
    PrefixTree::new(&CoreConfig { block_size, num_blocks, ..CoreConfig::default() })
}

const KEY: SeqKey<'_> = SeqKey { namespace: Namespace(5), spans: &[] };

/// Insert the whole blocks of `tokens` as nodes `first..`, by `step`.
fn grow(tree: &mut PrefixTree, first: u32, tokens: &[Token], step: u64) {
    let mut tail = None;
    for index in 0..tokens.len() / tree.block_size {
        let key = tree.key(tree.place(tail, KEY.namespace), KEY, tokens, index).expect("a block");
        let block = BlockId(first + index as u32);
        tree.insert(block, &key, StepId(step));
        tail = Some(block);
    }
}

fn matched(tree: &PrefixTree, tokens: &[Token]) -> Vec<u32> {
    let mut path = Vec::new();
    let place = tree.match_path(tree.place(None, KEY.namespace), KEY, tokens, 0, &mut path);
    assert_eq!(place, tree.place(path.last().copied(), KEY.namespace));
    path.iter().map(|block| block.0).collect()
}

#[test]
fn matches_are_whole_and_exact_at_every_length() {
    for block_size in [1, 2, 4, 8, 16, 32, 64] {
        let mut tree = tree_of(block_size, 600);
        // More than two batches, and not a whole number of them.
        let num_blocks = 2 * BATCH + FIRST_BATCH + 3;
        let tokens: Vec<Token> = (0..(num_blocks * block_size) as u32).map(|i| i % 7).collect();
        grow(&mut tree, 100, &tokens, 1);
        tree.check();
        let want = |num: usize| (100..100 + num as u32).collect::<Vec<_>>();
        for end in [0, 1, FIRST_BATCH, FIRST_BATCH + 1, 3 * FIRST_BATCH, 200, num_blocks] {
            assert_eq!(matched(&tree, &tokens[..end * block_size]), want(end));
            if end < num_blocks {
                let partial = &tokens[..(end + 1) * block_size - 1];
                assert_eq!(matched(&tree, partial), want(end));
                // Another token anywhere in the block ends the match before it.
                for position in end * block_size..(end + 1) * block_size {
                    let mut other = tokens.clone();
                    other[position] = 99;
                    assert_eq!(matched(&tree, &other), want(end));
                }
            }
        }
        let mut longer = tokens.clone();
        longer.resize(tokens.len() + 2 * block_size, 0);
        assert_eq!(matched(&tree, &longer), want(num_blocks));
    }
}

#[test]
fn a_match_goes_on_from_anywhere() {
    let mut tree = tree();
    let tokens: Vec<Token> = (0..40).collect();
    grow(&mut tree, 0, &tokens, 1);
    for first in 1..=10 {
        let place = tree.place(Some(BlockId(first - 1)), KEY.namespace);
        let mut path = vec![BlockId(77)];
        let end = tree.match_path(place, KEY, &tokens, first as usize, &mut path);
        assert_eq!(end, tree.place(Some(BlockId(9)), KEY.namespace));
        let want: Vec<BlockId> = [77].into_iter().chain(first..10).map(BlockId).collect();
        assert_eq!(path, want);
    }
    let mut path = Vec::new();
    let place = tree.place(Some(BlockId(2)), KEY.namespace);
    assert_eq!(tree.match_path(place, KEY, &tokens[..5], 3, &mut path), place);
    assert_eq!(path, []);
}

#[test]
fn collisions_do_not_confuse() {
    let mut tree = tree();
    tree.hasher.mask = 0;
    let prefix: Vec<Token> = (0..40).collect();
    grow(&mut tree, 0, &prefix, 1);
    for branch in 1..20 {
        let mut tokens = prefix.clone();
        tokens[4 * branch as usize % 40] = 100 + branch;
        if branch % 10 != 0 {
            continue;
        }
        grow(&mut tree, 20 * branch, &tokens, 1);
        assert_eq!(matched(&tree, &tokens), (20 * branch..20 * branch + 10).collect::<Vec<_>>());
    }
    tree.check();
    assert_eq!(matched(&tree, &prefix), (0..10).collect::<Vec<_>>());
}

/// Two paths part in the first block and go on with equal tokens, and every block of one has the hash
/// of its neighbour in the other: what is found below the wrong block must not be taken.
#[test]
fn a_candidate_below_a_wrong_candidate_is_wrong() {
    for mask in [1 << 63, 3 << 62, 7 << 61] {
        for token in 0..64 {
            let mut tree = tree();
            tree.hasher.mask = mask;
            let mut paths = [vec![token; 12], vec![token; 12]];
            paths[0][0] = 100;
            paths[1][0] = 101;
            grow(&mut tree, 0, &paths[0], 1);
            grow(&mut tree, 10, &paths[1], 1);
            tree.check();
            assert_eq!(matched(&tree, &paths[0]), [0, 1, 2]);
            assert_eq!(matched(&tree, &paths[1]), [10, 11, 12]);
        }
    }
}

#[test]
fn first_token_is_on_a_cache_line() {
    let tree = tree_of(16, 8);
    assert!(tree.first_token + 8 * 16 <= tree.tokens.len());
    let first = &raw const tree.tokens[tree.first_token];
    assert_eq!(first.align_offset(CACHE_LINE), 0);
}

#[test]
fn a_node_remembers_the_latest_step_of_its_path() {
    let mut tree = tree();
    grow(&mut tree, 0, &[0; 8], 5);
    let key = tree.key(tree.place(Some(BlockId(1)), KEY.namespace), KEY, &[0; 12], 2).expect("key");
    tree.insert(BlockId(2), &key, StepId(3));
    assert_eq!(tree.step(BlockId(2)), StepId(5));
    assert_eq!(tree.parent(BlockId(2)), Some(BlockId(1)));
    assert_eq!(tree.parent(BlockId(0)), None);
    assert_eq!(tree.parent(BlockId(3)), None);
    assert!(tree.is_leaf(BlockId(2)) && !tree.is_leaf(BlockId(1)) && !tree.is_leaf(BlockId(3)));
    assert_eq!(tree.remove(BlockId(2)), Some(BlockId(1)));
    assert!(tree.is_leaf(BlockId(1)) && !tree.contains(BlockId(2)));
    assert_eq!(tree.remove(BlockId(1)), Some(BlockId(0)));
    assert_eq!(tree.remove(BlockId(0)), None);
    tree.check();
}

#[test]
fn a_key_ends_where_the_tokens_do() {
    let tree = tree();
    let place = tree.place(None, KEY.namespace);
    assert!(tree.key(place, KEY, &[0; 7], 1).is_none());
    assert!(tree.key(place, KEY, &[0; 8], 2).is_none());
    assert!(tree.key(place, KEY, &[0; 8], 1).is_some());
}

#[test]
fn nodes_are_inserted_once_and_removed_as_leaves() {
    let grown = || {
        let mut tree = tree();
        grow(&mut tree, 0, &[0; 8], 1);
        tree
    };
    assert_panics("is a node already", || grow(&mut grown(), 1, &[1; 4], 1));
    assert_panics("children of", || grown().remove(BlockId(0)));
    assert_panics("a node to remove", || grown().remove(BlockId(2)));
}

#[test]
fn check_notices_every_broken_invariant() {
    let broken = |change: fn(&mut PrefixTree)| {
        move || {
            let mut tree = tree();
            grow(&mut tree, 0, &(0..12).collect::<Vec<_>>(), 4);
            let spans = [Span { start: 0, end: 4, digest: 1 }];
            let seq = SeqKey { spans: &spans, ..KEY };
            let key = tree.key(tree.place(None, KEY.namespace), seq, &[9; 4], 0).expect("key");
            tree.insert(BlockId(8), &key, StepId(9));
            tree.check();
            change(&mut tree);
            tree.check();
        }
    };
    assert_panics("parent of BlockId(1) is a node", broken(|tree| tree.links[0].parent = None));
    assert_panics("step of BlockId(2)", broken(|tree| tree.nodes[2].step = StepId(3)));
    assert_panics("number of children", broken(|tree| tree.nodes[1].num_children = 2));
    assert_panics("number of children", broken(|tree| tree.nodes[7].num_children = 1));
    assert_panics("chain hash of BlockId(1)", broken(|tree| tree.nodes[1].hash ^= 1));
    assert_panics("chain hash of BlockId(0)", broken(|tree| tree.namespaces[0] = Namespace(6)));
    assert_panics(
        "found under its key",
        broken(|tree| tree.children.remove(tree.nodes[2].hash, BlockId(2))),
    );
    assert_panics("links", broken(|tree| tree.children.insert(1, BlockId(9))));
    assert_panics(
        "spans",
        broken(|tree| {
            tree.spans.store(&[Span { start: 0, end: 1, digest: 0 }]);
        }),
    );
}
