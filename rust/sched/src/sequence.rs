//! Requests and their sequences, in slabs.
//!
//! A request is what a client asked; it owns 1..n sequences, each a token stream with a place in the
//! order of service. Their vectors are reserved by whoever submits, so that nothing here allocates
//! while a step is planned or committed.

use fastserve_base::{Nanos, Request, RowSlot, SeqId, Token};
use prefetch_index::prefetch_index;

use crate::policy::OrderKey;

/// A request that has not ended.
#[derive(Debug)]
pub struct RequestState {
    /// What was asked. Its prompt has moved into the sequence if there is only one.
    pub request: Request,
    /// Tokens of the prompt.
    pub num_prompt_tokens: u32,
    /// Its place among requests, by arrival.
    pub order: u64,
    /// The policy's rank.
    pub rank: i64,
    /// When its wait began.
    pub queued_at: Nanos,
    /// Sequences that have not ended, those still to come included.
    pub num_live: u32,
    /// Sequences that exist: `0..num_spawned`.
    pub num_spawned: u32,
    /// First of its sequences, linked by [`Sequence::next_sibling`].
    pub first_sequence: Option<u32>,
    /// Whether any of its sequences was ever admitted.
    pub was_admitted: bool,
    /// Token vectors for the sequences still to come.
    pub spare_tokens: Vec<Vec<Token>>,
}

/// Where a sequence stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// In the queue.
    Waiting,
    /// Has a row slot.
    Running(RowSlot),
    /// Preempted, and named by a step in flight: waits for it to commit, then queues again.
    Settling(RowSlot),
}

/// One token stream.
#[derive(Debug)]
pub struct Sequence {
    /// Its name.
    pub id: SeqId,
    /// Its request, by number.
    pub request: u32,
    /// The next sequence of the same request.
    pub next_sibling: Option<u32>,
    /// Known tokens: the prompt and what was generated and accepted.
    pub tokens: Vec<Token>,
    /// How many of them are the prompt.
    pub num_prompt_tokens: u32,
    /// Where it stands.
    pub status: Status,
    /// Its place in the order of service.
    pub key: OrderKey,
    /// Most tokens it was ever computed to: what is computed below is computed again.
    pub high_water: u32,
    /// How many sequences had ended when it was preempted last.
    pub preempted_at: Option<u64>,
    /// Steps that failed under it since its last token.
    pub num_failures: u32,
    /// Prompt tokens matched when it was first admitted; `None` before.
    pub num_cached_tokens: Option<u32>,
    /// Whether its wait for a leader is in the timeline.
    pub follows: bool,
}

impl Sequence {
    /// Tokens generated and accepted.
    pub fn num_output_tokens(&self) -> u32 {
        self.tokens.len() as u32 - self.num_prompt_tokens
    }
}

/// Numbered places, reused last freed first.
#[derive(Debug)]
pub struct Slab<T> {
    places: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    /// Room for `capacity` before anything grows.
    pub fn with_capacity(capacity: usize) -> Self {
        Self { places: Vec::with_capacity(capacity), free: Vec::with_capacity(capacity) }
    }

    /// Put `value` in a free place.
    pub fn insert(&mut self, value: T) -> u32 {
        if let Some(place) = self.free.pop() {
            self.places[place as usize] = Some(value);
            return place;
        }
        self.places.push(Some(value));
        (self.places.len() - 1) as u32
    }

    /// Empty a place. Panics if it is empty.
    pub fn remove(&mut self, place: u32) -> T {
        let value = self.places[place as usize].take().expect("the place is in use");
        self.free.push(place);
        value
    }

    /// What is in a place, if it is in use.
    #[inline]
    pub fn get(&self, place: u32) -> Option<&T> {
        self.places.get(place as usize)?.as_ref()
    }

    /// Ask memory for a place. Changes nothing.
    #[inline]
    pub fn prefetch(&self, place: u32) {
        prefetch_index(&self.places, place as usize);
    }

    /// What is in a place, if it is in use.
    pub fn get_mut(&mut self, place: u32) -> Option<&mut T> {
        self.places.get_mut(place as usize)?.as_mut()
    }

    /// Places in use.
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Whether no place is in use.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every place in use, by number.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.places
            .iter()
            .enumerate()
            .filter_map(|(place, value)| value.as_ref().map(|value| (place as u32, value)))
    }
}

impl<T> std::ops::Index<u32> for Slab<T> {
    type Output = T;

    #[inline]
    fn index(&self, place: u32) -> &T {
        self.places[place as usize].as_ref().expect("the place is in use")
    }
}

impl<T> std::ops::IndexMut<u32> for Slab<T> {
    #[inline]
    fn index_mut(&mut self, place: u32) -> &mut T {
        self.places[place as usize].as_mut().expect("the place is in use")
    }
}
