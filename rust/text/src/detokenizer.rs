//! One sequence's way from tokens to text.
//!
//! # What is emitted when
//!
//! The text so far is `emitted + held`. Bytes of a character that is not whole yet are `pending` and
//! not text at all. `held` is exactly the longest end of the text that is the beginning of a stop
//! string; without stop strings it is always empty.
//!
//! # Which stop string wins
//!
//! The one that is complete first; of those that end at the same place the longest, of equal ones the
//! first listed. This depends on the text alone, never on how it was cut into tokens or pushes. (The
//! leftmost rule would not do: while `"abc"` may still come, it could not stop at `"b"`.)
//!
//! A token is *kept* if its text begins before the end of the match, which is to say: all tokens up
//! to the one that completes it.

use std::sync::Arc;

use crate::stop::State;
use crate::{StopStrings, TokenTable};

const REPLACEMENT: &str = "\u{fffd}";

/// How one sequence is turned into text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DetokenizerOptions {
    /// Special tokens have no text. Stop strings are not found in them then.
    pub skip_special_tokens: bool,
    /// The text ends after the stop string, not before it.
    pub include_stop_str_in_output: bool,
    /// A stop string counts only where a token after this many completes it.
    pub min_tokens: usize,
    /// Drop one space at the very beginning: the one that `SentencePiece` puts before the
    /// first word. For text that starts at these tokens; not for the continuation of a prompt.
    pub strip_leading_space: bool,
}

impl Default for DetokenizerOptions {
    fn default() -> Self {
        Self {
            skip_special_tokens: true,
            include_stop_str_in_output: false,
            min_tokens: 0,
            strip_leading_space: false,
        }
    }
}

/// A stop string ended the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopMatch {
    /// Which of the stop strings.
    pub index: usize,
    /// Tokens up to the one that completes it; those after it do not count.
    pub num_tokens_kept: usize,
}

/// Turns one sequence's tokens into text deltas. See the module's page.
#[derive(Debug)]
pub struct Detokenizer {
    table: Arc<TokenTable>,
    stops: Arc<StopStrings>,
    options: DetokenizerOptions,
    /// Tokens pushed and not beyond a match.
    num_tokens: usize,
    /// The leading space, if one is to be stripped, has not been passed.
    at_start: bool,
    /// First bytes of a character, at most three.
    pending: Vec<u8>,
    /// The token that the last byte of `pending` belongs to, counted from 1.
    pending_token: usize,
    held: String,
    state: State,
    stopped: Option<StopMatch>,
}

impl Detokenizer {
    /// A detokenizer at the beginning of a sequence.
    pub fn new(
        table: Arc<TokenTable>,
        stops: Arc<StopStrings>,
        options: DetokenizerOptions,
    ) -> Self {
        Self {
            table,
            stops,
            options,
            num_tokens: 0,
            at_start: true,
            pending: Vec::with_capacity(4),
            pending_token: 0,
            held: String::new(),
            state: State::default(),
            stopped: None,
        }
    }

    /// Take `tokens`, append the text that is now certain to `delta`, and say whether a stop string
    /// ended it.
    ///
    /// After a match nothing more is appended, and every further call repeats the match.
    pub fn push(&mut self, tokens: &[u32], delta: &mut String) -> Option<StopMatch> {
        let table = Arc::clone(&self.table);
        for &token in tokens {
            if self.stopped.is_some() {
                break;
            }
            self.num_tokens += 1;
            if !(self.options.skip_special_tokens && table.is_special(token)) {
                self.push_bytes(table.bytes_of(token), delta);
            }
        }
        self.stopped
    }

    /// The sequence is over: append what was held back to `delta`.
    ///
    /// A character that never became whole is one U+FFFD; it is not searched for stop strings.
    pub fn finish(&mut self, delta: &mut String) {
        delta.push_str(&self.held);
        self.held.clear();
        self.state = State::default();
        if !self.pending.is_empty() {
            self.pending.clear();
            delta.push_str(REPLACEMENT);
        }
    }

    /// Tokens pushed so far; after a match, those that are kept.
    pub fn num_tokens_kept(&self) -> usize {
        self.stopped.map_or(self.num_tokens, |stop| stop.num_tokens_kept)
    }

    fn push_bytes(&mut self, mut bytes: &[u8], delta: &mut String) {
        if self.at_start && !bytes.is_empty() {
            self.at_start = false;
            if self.options.strip_leading_space {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
        }
        if self.pending.is_empty() {
            self.push_characters(bytes, 0, delta);
        } else if !bytes.is_empty() {
            let num_pending = self.pending.len();
            let mut joined = std::mem::take(&mut self.pending);
            joined.extend_from_slice(bytes);
            self.push_characters(&joined, num_pending, delta);
        }
    }

    /// Pass on the whole characters of `bytes`, of which the first `num_old` are an earlier token's.
    fn push_characters(&mut self, mut bytes: &[u8], mut num_old: usize, delta: &mut String) {
        while !bytes.is_empty() && self.stopped.is_none() {
            let (text, invalid) = match std::str::from_utf8(bytes) {
                Ok(text) => (text, None),
                Err(error) => {
                    let (valid, _) = bytes.split_at(error.valid_up_to());
                    (std::str::from_utf8(valid).unwrap_or_default(), Some(error.error_len()))
                }
            };
            bytes = &bytes[text.len()..];
            if !text.is_empty() {
                num_old = 0;
                self.push_text(text, self.num_tokens, delta);
            }
            match invalid {
                None => {}
                Some(None) => {
                    self.pending.clear();
                    self.pending.extend_from_slice(bytes);
                    self.pending_token = self.num_tokens;
                    return;
                }
                Some(Some(length)) => {
                    // Old bytes are the beginning of a character. Where they turn out not to be one,
                    // the replacement ends where they end: it is the earlier token's.
                    let token = if num_old == 0 { self.num_tokens } else { self.pending_token };
                    num_old = 0;
                    bytes = &bytes[length..];
                    if self.stopped.is_none() {
                        self.push_text(REPLACEMENT, token, delta);
                    }
                }
            }
        }
    }

    /// Pass on `text`, whose characters end in token number `token`.
    fn push_text(&mut self, text: &str, token: usize, delta: &mut String) {
        if self.stops.is_empty() {
            delta.push_str(text);
            return;
        }
        let num_held = self.held.len();
        self.held.push_str(text);
        for (end, byte) in (num_held + 1..).zip(text.bytes()) {
            self.state = self.stops.next(self.state, byte);
            if token <= self.options.min_tokens {
                continue;
            }
            if let Some((index, length)) = self.stops.matched(self.state) {
                let cut = if self.options.include_stop_str_in_output { end } else { end - length };
                delta.push_str(&self.held[..cut]);
                self.held.clear();
                self.pending.clear();
                self.stopped = Some(StopMatch { index, num_tokens_kept: token });
                return;
            }
        }
        let certain = self.held.len() - self.stops.depth(self.state);
        delta.push_str(&self.held[..certain]);
        self.held.drain(..certain);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detokenizer(tokens: &[&[u8]], stops: &[&str], options: DetokenizerOptions) -> Detokenizer {
        let table = TokenTable::new(tokens.iter().copied(), &[]);
        Detokenizer::new(Arc::new(table), Arc::new(StopStrings::new(stops).unwrap()), options)
    }

    /// The delta of each token pushed alone, the delta of `finish`, and the match.
    fn deltas(detokenizer: &mut Detokenizer, num_tokens: u32) -> (Vec<String>, Option<StopMatch>) {
        let mut all = Vec::new();
        let mut stop = None;
        for token in 0..num_tokens {
            let mut delta = String::new();
            stop = detokenizer.push(&[token], &mut delta);
            all.push(delta);
        }
        let mut delta = String::new();
        detokenizer.finish(&mut delta);
        all.push(delta);
        (all, stop)
    }

    #[test]
    fn a_character_waits_for_its_last_byte() {
        let mut emoji =
            detokenizer(&[b"a\xf0", b"\x9f\x98", b"\x80b"], &[], DetokenizerOptions::default());
        assert_eq!(deltas(&mut emoji, 3).0, ["a", "", "😀b", ""]);
    }

    #[test]
    fn broken_characters_become_one_replacement_each() {
        // E2 82 is two thirds of '€', FF is nothing, F0 9F is half of an emoji at the end.
        let mut broken =
            detokenizer(&[b"\xe2\x82", b"(\xff", b"\xf0\x9f"], &[], DetokenizerOptions::default());
        assert_eq!(deltas(&mut broken, 3).0, ["", "\u{fffd}(\u{fffd}", "", "\u{fffd}"]);
    }

    #[test]
    fn held_text_comes_out_when_it_turns_out_harmless_and_at_the_end() {
        let mut held =
            detokenizer(&[b"a<", b"/", b"b<", b"/s"], &["</s>"], DetokenizerOptions::default());
        assert_eq!(deltas(&mut held, 4).0, ["a", "", "</b", "", "</s"]);
    }

    #[test]
    fn a_stop_string_across_tokens_cuts_the_text_and_the_tokens() {
        let tokens: [&[u8]; 4] = [b"one\n", b"\nUs", b"er: x", b"y"];
        let mut cut = detokenizer(&tokens, &["\n\nUser:"], DetokenizerOptions::default());
        let (text, stop) = deltas(&mut cut, 4);
        assert_eq!(text, ["one", "", "", "", ""]);
        assert_eq!(stop, Some(StopMatch { index: 0, num_tokens_kept: 3 }));
        assert_eq!(cut.num_tokens_kept(), 3);

        let options = DetokenizerOptions { include_stop_str_in_output: true, ..Default::default() };
        let mut kept = detokenizer(&tokens, &["\n\nUser:"], options);
        assert_eq!(deltas(&mut kept, 4).0, ["one", "", "\n\nUser:", "", ""]);
    }

    #[test]
    fn a_replacement_belongs_to_the_token_whose_bytes_it_replaces() {
        let mut stop =
            detokenizer(&[b"a", b"\xe2", b"b"], &["\u{fffd}"], DetokenizerOptions::default());
        assert_eq!(
            deltas(&mut stop, 3),
            (
                vec!["a".into(), String::new(), String::new(), String::new()],
                Some(StopMatch { index: 0, num_tokens_kept: 2 })
            )
        );
    }

    #[test]
    fn before_min_tokens_a_stop_string_is_text() {
        let options = DetokenizerOptions { min_tokens: 2, ..Default::default() };
        let mut late = detokenizer(&[b"a.", b"b.", b"c.", b"d."], &["."], options);
        let (text, stop) = deltas(&mut late, 4);
        assert_eq!(text.concat(), "a.b.c");
        assert_eq!(stop, Some(StopMatch { index: 0, num_tokens_kept: 3 }));
    }

    #[test]
    fn one_leading_space_is_stripped_and_only_at_the_start() {
        let options = DetokenizerOptions { strip_leading_space: true, ..Default::default() };
        let mut spaced = detokenizer(&[b"", b"  a", b" b"], &[], options);
        assert_eq!(deltas(&mut spaced, 3).0, ["", " a", " b", ""]);
    }
}
