//! Ids are types, so that a block cannot be passed for a row slot.

/// A token id, as the vocabulary numbers it.
pub type Token = u32;

/// A point in time or a duration, in nanoseconds on any monotonic clock of the caller's.
pub type Nanos = u64;

macro_rules! index_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The id as a position in an array.
            #[inline]
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}

index_id! {
    /// Index of a block in the pool: `0..capacity`. Not a slot, not a byte offset.
    BlockId
}
index_id! {
    /// A running sequence's place in persistent state: `0..max_num_seqs`.
    RowSlot
}

/// What the caller calls a request. Unique among the requests that have not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct RequestId(pub u64);

/// One token stream of a request: `index` is `0..num_sequences`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct SeqId {
    /// The request that owns the sequence.
    pub request: RequestId,
    /// Which of the request's sequences.
    pub index: u32,
}

/// Steps are numbered from 1 in the order they are planned, and commit in that order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct StepId(pub u64);

/// Names a copy that outlives its step, until `complete(ticket, …)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Ticket(pub u64);

/// Who may share a prefix with whom: a digest of the caller's salt and the adapter's generation.
///
/// Sequences of different namespaces never share a block. 0 is the common namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Namespace(pub u128);
