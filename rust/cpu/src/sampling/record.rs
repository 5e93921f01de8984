//! A request's sampling parameters, decoded.
//!
//! The words are described where they are written, in `python/fastserve/sampling_record.py`. Floats
//! travel as their bits, and every value of them is legal: what it leads to ends one row alone.

use crate::error::{ArgumentError, require};

/// What a record begins with.
const VERSION: i32 = 1;

/// Words before the lists.
const FIXED_WORDS: usize = 18;

/// What one sequence is sampled with.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Record {
    pub(super) temperature: f32,
    pub(super) top_p: f32,
    pub(super) min_p: f32,
    /// 0: all.
    pub(super) top_k: i32,
    pub(super) min_tokens: i32,
    pub(super) presence_penalty: f32,
    pub(super) frequency_penalty: f32,
    pub(super) repetition_penalty: f32,
    pub(super) seed: u64,
    pub(super) is_greedy: bool,
    /// Best tokens whose log probabilities are wanted; below 0: none, not the sampled one's either.
    pub(super) num_logprobs: i32,
    /// The same for tokens of the prompt.
    pub(super) num_prompt_logprobs: i32,
    /// Tokens that are masked before `min_tokens`.
    pub(super) end_tokens: Vec<i32>,
    /// Tokens, and what is added to their logits.
    pub(super) biases: Vec<(i32, f32)>,
    /// The only tokens to take; all where it is empty.
    pub(super) allowed: Vec<i32>,
}

impl Record {
    /// Read a record for a vocabulary of `vocab_size`.
    ///
    /// # Errors
    ///
    /// Another version, another length than its counts say, a token outside the vocabulary.
    pub(super) fn decode(words: &[i32], vocab_size: usize) -> Result<Self, ArgumentError> {
        let version = words.first().copied().unwrap_or(0);
        require(
            version == VERSION,
            "sampling record",
            || format!("version {version}"),
            || format!("{VERSION}, encoded by fastserve.sampling_record.encode"),
        )?;
        let too_short = || {
            let want = "as many as its counts say";
            ArgumentError::new("sampling record", format!("{} words", words.len()), want)
        };
        let (fixed, mut lists) = words.split_at_checked(FIXED_WORDS).ok_or_else(too_short)?;
        let mut list = |count: usize| {
            let len = usize::try_from(fixed[count]).ok();
            let (list, rest) =
                len.and_then(|len| lists.split_at_checked(len)).ok_or_else(too_short)?;
            lists = rest;
            Ok::<_, ArgumentError>(list)
        };
        let end_tokens = list(14)?;
        let (biased, amounts) = (list(15)?, list(15)?);
        let allowed = list(16)?;
        for tokens in [end_tokens, biased, allowed] {
            super::check_indices("sampling record", tokens, tokens.len(), vocab_size)?;
        }
        let float = |word: usize| f32::from_bits(fixed[word] as u32);
        let amounts = amounts.iter().map(|&bits| f32::from_bits(bits as u32));
        Ok(Self {
            temperature: float(1),
            top_p: float(2),
            min_p: float(3),
            top_k: fixed[4],
            min_tokens: fixed[5],
            presence_penalty: float(6),
            frequency_penalty: float(7),
            repetition_penalty: float(8),
            seed: u64::from(fixed[9] as u32) | u64::from(fixed[10] as u32) << 32,
            is_greedy: fixed[11] != 0,
            num_logprobs: fixed[12],
            num_prompt_logprobs: fixed[13],
            end_tokens: end_tokens.to_vec(),
            biases: biased.iter().copied().zip(amounts).collect(),
            allowed: allowed.to_vec(),
        })
    }

    /// Whether any of the three penalties is on.
    #[expect(clippy::float_cmp, reason = "a factor of one, to the bit, changes nothing")]
    pub(super) fn is_penalized(&self) -> bool {
        self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
            || self.repetition_penalty != 1.0
    }

    /// Whether logits change in any way before the best one is sought.
    pub(super) fn adjusts(&self) -> bool {
        self.is_penalized()
            || !self.biases.is_empty()
            || !self.allowed.is_empty()
            || (self.min_tokens > 0 && !self.end_tokens.is_empty())
    }
}
