//! What a sampler keeps of each row slot's sequence.

use super::counts::TokenCounts;
use super::record::Record;
use crate::error::{ArgumentError, require};

/// A row slot is a sequence's from now on.
#[derive(Debug, Clone, Copy)]
pub struct Assignment<'a> {
    /// Which slot.
    pub slot: i32,
    /// The request that owns the sequence.
    pub request: u64,
    /// Which of the request's sequences.
    pub index: u32,
    /// How many of `tokens` are the prompt's.
    pub num_prompt_tokens: u32,
    /// The request's sampling record.
    pub record: &'a [i32],
    /// The sequence so far; −1 − slot: that slot's last sample.
    pub tokens: &'a [i32],
}

/// A sequence in its slot.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) record: Record,
    pub(super) request: u64,
    pub(super) index: u32,
    pub(super) num_prompt_tokens: i32,
    /// Its tokens, where there are penalties.
    pub(super) counts: Option<TokenCounts>,
    /// Its prompt, where that is scored.
    pub(super) prompt: Vec<i32>,
}

/// All slots, and counts that none of them uses.
#[derive(Debug)]
pub(super) struct Slots {
    vocab_size: usize,
    places: Vec<Option<Slot>>,
    spare_counts: Vec<TokenCounts>,
}

impl Slots {
    pub(super) fn new(num_slots: usize, vocab_size: usize) -> Self {
        let places = (0..num_slots).map(|_| None).collect();
        Self { vocab_size, places, spare_counts: Vec::new() }
    }

    /// The sequence in `slot`, if there is one.
    pub(super) fn get(&self, slot: i32) -> Option<&Slot> {
        self.places.get(usize::try_from(slot).ok()?)?.as_ref()
    }

    /// The sequence in `slot`, which was seen to have one: otherwise a bug, and a panic.
    pub(super) fn checked(&self, slot: i32) -> &Slot {
        self.get(slot).expect("a slot that was checked has a sequence")
    }

    /// The same, to change.
    pub(super) fn checked_mut(&mut self, slot: i32) -> &mut Slot {
        self.places[slot as usize].as_mut().expect("a slot that was checked has a sequence")
    }

    /// Take over a slot. `last_samples` are those of all slots.
    ///
    /// # Errors
    ///
    /// A slot, token or record that cannot be; the slot then has no sequence.
    pub(super) fn assign(
        &mut self,
        given: &Assignment<'_>,
        last_samples: &[i32],
    ) -> Result<(), ArgumentError> {
        self.release(given.slot)?;
        let record = Record::decode(given.record, self.vocab_size)?;
        let num_prompt_tokens = given.num_prompt_tokens as usize;
        let Some((prompt, _)) = given.tokens.split_at_checked(num_prompt_tokens) else {
            let got = given.tokens.len().to_string();
            let want = format!("at least the prompt's {num_prompt_tokens}");
            return Err(ArgumentError::new("tokens", got, want));
        };
        let is_scored = record.num_prompt_logprobs >= 0;
        let counts = if record.is_penalized() {
            Some(self.counts_of(given.tokens, num_prompt_tokens, last_samples)?)
        } else {
            None
        };
        self.places[given.slot as usize] = Some(Slot {
            record,
            request: given.request,
            index: given.index,
            num_prompt_tokens: given.num_prompt_tokens as i32,
            counts,
            prompt: if is_scored { prompt.to_vec() } else { Vec::new() },
        });
        Ok(())
    }

    /// Forget what `slot` held.
    ///
    /// # Errors
    ///
    /// There is no such slot.
    pub(super) fn release(&mut self, slot: i32) -> Result<(), ArgumentError> {
        let num_slots = self.places.len();
        let place = usize::try_from(slot).ok().and_then(|slot| self.places.get_mut(slot));
        let Some(place) = place else {
            let want = format!("one of {num_slots} slots");
            return Err(ArgumentError::new("slot", slot.to_string(), want));
        };
        if let Some(counts) = place.take().and_then(|held| held.counts) {
            self.spare_counts.push(counts);
        }
        Ok(())
    }

    fn counts_of(
        &mut self,
        tokens: &[i32],
        num_prompt_tokens: usize,
        last_samples: &[i32],
    ) -> Result<TokenCounts, ArgumentError> {
        let vocab_size = self.vocab_size;
        let mut counts = self.spare_counts.pop().unwrap_or_else(|| TokenCounts::new(vocab_size));
        counts.clear();
        for (at, &token) in tokens.iter().enumerate() {
            let known = if token < 0 {
                last_samples.get((-1 - token) as usize).copied().unwrap_or(token)
            } else {
                token
            };
            require(
                (0..vocab_size as i32).contains(&known),
                "tokens",
                || format!("{token} at {at}"),
                || format!("0 to {}, or −1 − slot", vocab_size - 1),
            )?;
            if at < num_prompt_tokens {
                counts.add_prompt(known);
            } else {
                counts.add_output(known);
            }
        }
        Ok(counts)
    }
}
