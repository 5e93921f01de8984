//! The fake model and the reference streams, against what they are meant to depend on.

use fastserve_base::{FinishReason, Namespace, Request, RequestId, Span};
use fastserve_sim::model::Stream;
use fastserve_sim::rng::Rng;

const VOCAB: u32 = 50;

fn request(prompt: &[u32], max_tokens: u32) -> Request {
    Request::new(RequestId(1), prompt.to_vec(), max_tokens)
}

fn stream(request: &Request, index: u32) -> Stream {
    Stream::new(request, index, VOCAB, 100)
}

#[test]
fn outputs_depend_on_the_whole_prefix() {
    let base = stream(&request(&[1, 2, 3, 4], 20), 0);
    assert_eq!(base.outputs(), stream(&request(&[1, 2, 3, 4], 20), 0).outputs());
    assert_ne!(base.outputs(), stream(&request(&[0, 2, 3, 4], 20), 0).outputs(), "first token");
    assert_ne!(base.outputs(), stream(&request(&[2, 1, 3, 4], 20), 0).outputs(), "order");
    assert_ne!(base.outputs(), stream(&request(&[1, 2, 3, 4], 20), 1).outputs(), "fork");

    let salted = Request { namespace: Namespace(1 << 64), ..request(&[1, 2, 3, 4], 20) };
    assert_ne!(base.outputs(), stream(&salted, 0).outputs(), "namespace");
    let seeded = Request { sampling: vec![7], ..request(&[1, 2, 3, 4], 20) };
    assert_ne!(base.outputs(), stream(&seeded, 0).outputs(), "sampling record");
    assert_eq!(base.prefixes[3], stream(&seeded, 0).prefixes[3], "K and V do not know the sampler");
}

#[test]
fn going_on_from_its_own_outputs_changes_nothing() {
    let base = stream(&request(&[5, 6], 20), 0);
    let whole = stream(&request(&base.tokens[..12], 10), 0);
    assert_eq!(base.tokens[..22], whole.tokens[..]);
    assert_eq!(base.prefixes[..22], whole.prefixes[..]);
}

#[test]
fn a_span_changes_what_it_covers_and_all_after() {
    let plain = stream(&request(&[1; 8], 4), 0);
    let spanned = |start, end, digest| {
        let spans = vec![Span { start, end, digest }];
        stream(&Request { spans, ..request(&[1; 8], 4) }, 0)
    };
    let (a, b) = (spanned(2, 4, 1), spanned(2, 4, 1 << 100));
    assert_eq!(plain.prefixes[..2], a.prefixes[..2]);
    assert!((2..8).all(|at| plain.prefixes[at] != a.prefixes[at]));
    assert!((2..8).all(|at| a.prefixes[at] != b.prefixes[at]), "digest");
    let longer = spanned(2, 5, 1);
    assert_eq!(a.prefixes[3], longer.prefixes[3]);
    assert_ne!(a.prefixes[4], longer.prefixes[4], "length");
}

#[test]
fn a_stream_ends_at_the_first_stop_token_that_counts() {
    let open = stream(&request(&[9, 8], 30), 0);
    assert_eq!((open.num_outputs, open.finish), (30, FinishReason::Length));
    let stop = open.outputs()[0];
    let ended = |min_tokens| {
        let stop_token_ids = vec![stop];
        stream(&Request { stop_token_ids, min_tokens, ..request(&[9, 8], 30) }, 0)
    };
    assert_eq!((ended(0).num_outputs, ended(0).finish), (1, FinishReason::Stop));
    assert_eq!(ended(1).num_outputs, 1);
    assert!(ended(2).num_outputs > 1, "min_tokens");
    assert_eq!(Stream::new(&request(&[9, 8], 30), 0, VOCAB, 10).num_outputs, 8, "model length");
}

#[test]
fn the_generator_is_even_and_its_streams_are_their_own() {
    let mut rng = Rng::new(3);
    let mut counts = [0_u32; 7];
    for _ in 0..7000 {
        counts[rng.below(7) as usize] += 1;
    }
    assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    let (mut one, mut two) = (rng.stream(1), rng.stream(2));
    assert_ne!(one.bits(), two.bits());
}
