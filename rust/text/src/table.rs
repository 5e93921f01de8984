//! What every token id stands for, in bytes.

/// The bytes of each token id, and which ids are special. Shared by all sequences of a model.
///
/// One flat buffer: a vocabulary of 150,000 tokens is one allocation and not 150,000.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenTable {
    bytes: Vec<u8>,
    /// `bytes[ends[id - 1]..ends[id]]` belongs to `id`.
    ends: Vec<usize>,
    is_special: Vec<bool>,
}

impl TokenTable {
    /// A table of `tokens`, by id. Ids in `special` that the table does not reach are ignored.
    pub fn new<'a>(tokens: impl IntoIterator<Item = &'a [u8]>, special: &[u32]) -> Self {
        let mut bytes = Vec::new();
        let ends: Vec<usize> = tokens
            .into_iter()
            .map(|token| {
                bytes.extend_from_slice(token);
                bytes.len()
            })
            .collect();
        let mut is_special = vec![false; ends.len()];
        for &id in special {
            if let Some(flag) = is_special.get_mut(id as usize) {
                *flag = true;
            }
        }
        Self { bytes, ends, is_special }
    }

    /// Tokens in the table.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether the table has no tokens.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The bytes of `token`.
    ///
    /// Empty beyond the table: a model's vocabulary is often padded to a round number, and a padding
    /// id that is sampled nevertheless has no text.
    pub fn bytes_of(&self, token: u32) -> &[u8] {
        let id = token as usize;
        let Some(&end) = self.ends.get(id) else {
            return &[];
        };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start..end]
    }

    /// Whether `token` is special (marks structure, such as the end of a turn).
    pub fn is_special(&self, token: u32) -> bool {
        self.is_special.get(token as usize).copied().unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_its_own_bytes_and_nothing_beyond_the_table() {
        let table = TokenTable::new([&b"a"[..], b"", b"\xff\x00", b"<eos>"], &[3, 77]);
        assert_eq!(table.len(), 4);
        assert_eq!(table.bytes_of(0), b"a");
        assert_eq!(table.bytes_of(1), b"");
        assert_eq!(table.bytes_of(2), b"\xff\x00");
        assert_eq!(table.bytes_of(3), b"<eos>");
        assert_eq!(table.bytes_of(4), b"");
        assert_eq!(table.bytes_of(u32::MAX), b"");
        assert!(table.is_special(3) && !table.is_special(2) && !table.is_special(77));
    }

    #[test]
    fn an_empty_table_has_no_text() {
        let table = TokenTable::new([], &[0]);
        assert!(table.is_empty());
        assert_eq!(table.bytes_of(0), b"");
    }
}
