//! How often a sequence has had each token, for penalties.

/// Count of a token that the sequence has not had.
const UNSEEN: i32 = -1;

/// Tokens of one sequence, over a whole vocabulary.
///
/// Forgetting takes as long as there are tokens in it, not as there are in the vocabulary.
#[derive(Debug)]
pub(super) struct TokenCounts {
    /// Times among the output; a token of the prompt alone has 0.
    counts: Vec<i32>,
    /// Every token that was seen, once.
    seen: Vec<i32>,
}

impl TokenCounts {
    /// Nothing seen of `vocab_size` tokens.
    pub(super) fn new(vocab_size: usize) -> Self {
        Self { counts: vec![UNSEEN; vocab_size], seen: Vec::new() }
    }

    /// As new.
    pub(super) fn clear(&mut self) {
        for token in self.seen.drain(..) {
            self.counts[token as usize] = UNSEEN;
        }
    }

    /// `token` is in the prompt.
    pub(super) fn add_prompt(&mut self, token: i32) {
        self.add(token, 0);
    }

    /// `token` is the next of the output.
    pub(super) fn add_output(&mut self, token: i32) {
        self.add(token, 1);
    }

    fn add(&mut self, token: i32, times: i32) {
        let count = &mut self.counts[token as usize];
        if *count == UNSEEN {
            *count = 0;
            self.seen.push(token);
        }
        *count += times;
    }

    /// Every token that was seen, and its times among the output.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, i32)> {
        self.seen.iter().map(|&token| (token as usize, self.counts[token as usize]))
    }
}
