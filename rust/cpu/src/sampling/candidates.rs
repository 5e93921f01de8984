//! What may be drawn in a row, and where a running sum of it reaches a target.
//!
//! Nothing is sorted: half of the candidates are put before the other half in the order that is
//! asked for, and the sum of the first half says in which of the two to go on. That serves top-p, in
//! order of weights, and the draw, in order of tokens.

use std::cmp::Reverse;

use super::MAX_COLS;
use super::weight::ONE;

/// Bits of a token; the weight is in those above.
const TOKEN_BITS: u32 = MAX_COLS.trailing_zeros();
const TOKEN_MASK: u64 = MAX_COLS as u64 - 1;

const _: () = assert!(MAX_COLS.is_power_of_two() && ONE.leading_zeros() >= TOKEN_BITS);

/// A token and its weight. The greater one is heavier, or as heavy with a lower token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate(u64);

impl Candidate {
    #[inline(always)]
    pub(super) fn new(token: usize, weight: u64) -> Self {
        Self((weight << TOKEN_BITS) | (TOKEN_MASK - token as u64))
    }

    pub(super) fn token(self) -> usize {
        (TOKEN_MASK - (self.0 & TOKEN_MASK)) as usize
    }

    pub(super) fn weight(self) -> u64 {
        self.0 >> TOKEN_BITS
    }
}

/// The sum of the weights.
pub(super) fn total(candidates: &[Candidate]) -> u64 {
    candidates.iter().map(|candidate| candidate.weight()).sum()
}

/// Leave the heaviest, equals by token, up to the one with which they weigh `target`; all if they
/// do not.
pub(super) fn keep_heaviest(candidates: &mut Vec<Candidate>, target: u64) {
    let num_kept = reach(candidates, target, |&candidate| Reverse(candidate));
    candidates.truncate(num_kept);
}

/// The token at which the running sum, in order of tokens, exceeds the share `bits` / 2^64 of the
/// whole: the last one if none does, `None` if there is none.
pub(super) fn pick(candidates: &mut [Candidate], bits: u64) -> Option<usize> {
    let target = share(total(candidates), bits);
    let num = reach(candidates, target + 1, |candidate| candidate.token());
    candidates[..num].last().map(|candidate| candidate.token())
}

/// `floor(total * bits / 2^64)`.
pub(super) fn share(total: u64, bits: u64) -> u64 {
    ((u128::from(total) * u128::from(bits)) >> 64) as u64
}

/// Put candidates in order so far that the first n are those before all others, the last of them at
/// its place, where n is the least number that weighs `target`, or all. Returns n.
fn reach<K: Ord>(
    candidates: &mut [Candidate],
    target: u64,
    key: impl Fn(&Candidate) -> K,
) -> usize {
    // The first `from` are before all others and weigh `before`, less than the target; the first
    // `to` are before all others too, and weigh it unless they are all.
    let (mut from, mut to, mut before) = (0, candidates.len(), 0);
    while to - from > 1 {
        let half = (to - from) / 2;
        candidates[from..to].select_nth_unstable_by_key(half, &key);
        let weight = total(&candidates[from..from + half]);
        if before + weight >= target {
            to = from + half;
        } else {
            before += weight;
            from += half;
        }
    }
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(weights: &[u64]) -> Vec<Candidate> {
        weights.iter().enumerate().map(|(token, &weight)| Candidate::new(token, weight)).collect()
    }

    fn tokens(candidates: &[Candidate]) -> Vec<usize> {
        let mut tokens: Vec<_> = candidates.iter().map(|candidate| candidate.token()).collect();
        tokens.sort_unstable();
        tokens
    }

    #[test]
    fn a_candidate_keeps_both_numbers() {
        for token in [0, 1, MAX_COLS - 1] {
            for weight in [0, 1, ONE] {
                let candidate = Candidate::new(token, weight);
                assert_eq!((candidate.token(), candidate.weight()), (token, weight));
            }
        }
        assert!(Candidate::new(7, 3) > Candidate::new(1, 2));
        assert!(Candidate::new(1, 3) > Candidate::new(2, 3));
    }

    #[test]
    fn the_heaviest_that_weigh_enough() {
        for (target, want) in [
            (1, vec![1]),
            (9, vec![1]),
            (10, vec![1, 2]),
            (14, vec![1, 2]),
            (15, vec![1, 2, 4]),
            (19, vec![1, 2, 4]),
            (21, vec![0, 1, 2, 4, 5]),
            (22, vec![0, 1, 2, 3, 4, 5]),
            (99, vec![0, 1, 2, 3, 4, 5]),
        ] {
            let mut candidates = some(&[1, 9, 5, 0, 5, 1]);
            keep_heaviest(&mut candidates, target);
            assert_eq!(tokens(&candidates), want, "target {target}");
        }
    }

    #[test]
    fn a_pick_is_the_inverse_of_the_running_sum() {
        let weights = [3, 0, 1, 4];
        let want = [0, 0, 0, 2, 3, 3, 3, 3];
        for (eighth, want) in want.into_iter().enumerate() {
            let mut candidates = some(&weights);
            candidates.reverse();
            assert_eq!(pick(&mut candidates, (eighth as u64) << 61), Some(want));
        }
        assert_eq!(pick(&mut some(&weights), u64::MAX), Some(3));
        assert_eq!(pick(&mut some(&[0, 0]), 5), Some(1));
        assert_eq!(pick(&mut [], 5), None);
    }
}
