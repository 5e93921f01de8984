//! Tokens to text, one sequence at a time: deltas that never split a character, and stop strings.
//!
//! A byte-level tokenizer cuts text anywhere, inside a character too, so a token's bytes are not
//! text by themselves. [`Detokenizer`] turns a stream of tokens into a stream of text pieces whose
//! concatenation is exactly the text of the whole:
//!
//! ```text
//! tokens ──▶ bytes ──▶ characters ──────────────▶ stop strings ──────────────▶ delta
//!      TokenTable    a character whose bytes      text that may be the
//!                    are not all there waits      beginning of one waits
//! ```
//!
//! Both waits end: with the next token, with a match, or with [`Detokenizer::finish`].
//!
//! Bytes that are no UTF-8 become U+FFFD, one for each maximal part of a character (the rule of the
//! WHATWG, of [`String::from_utf8_lossy`] and of Python's `bytes.decode("utf-8", "replace")`).
//!
//! Architecture invariant: nothing here knows the engine, a scheduler or a tokenizer's file format.
//! The table is bytes by token id; whoever loads a tokenizer makes one.

#![forbid(unsafe_code)]

mod detokenizer;
mod stop;
mod table;

pub use detokenizer::{Detokenizer, DetokenizerOptions, StopMatch};
pub use stop::{MAX_NUM_STOP_STRINGS, StopError, StopStrings};
pub use table::TokenTable;
