//! The detokenizer against a model too simple to be wrong: decode everything, then look.

use std::sync::Arc;

use fastserve_text::{Detokenizer, DetokenizerOptions, StopStrings, TokenTable};
use proptest::collection::vec;
use proptest::prelude::*;

/// A small alphabet, so that stop strings are met, begun and broken off all the time.
const PIECES: [&[u8]; 16] = [
    b"a",
    b"b",
    b"ab",
    b" ",
    b"",
    b"\n",
    "é".as_bytes(),
    "好".as_bytes(),
    b"\xf0\x9f",
    b"\x98\x80",
    b"\xe2",
    b"\x82\xac",
    b"\xcc\x81",
    b"\xff",
    b"\xed\xa0",
    b"<s>",
];
const SPECIAL: u32 = 15;
const LETTERS: [&str; 7] = ["a", "b", " ", "é", "好", "😀", "\u{fffd}"];

/// What the text side should answer: text, `(stop index, tokens kept)`.
type Answer = (String, Option<(usize, usize)>);

fn model(tokens: &[u32], stops: &[String], options: DetokenizerOptions) -> Answer {
    // Every byte with the number of the token it belongs to.
    let mut bytes: Vec<(u8, usize)> = (1..)
        .zip(tokens)
        .filter(|&(_, &token)| !(options.skip_special_tokens && token == SPECIAL))
        .flat_map(|(number, &token)| PIECES[token as usize].iter().map(move |&byte| (byte, number)))
        .collect();
    if options.strip_leading_space && bytes.first().is_some_and(|&(byte, _)| byte == b' ') {
        bytes.remove(0);
    }
    let raw: Vec<u8> = bytes.iter().map(|&(byte, _)| byte).collect();

    // Every character with the number of the token that its last byte belongs to.
    let mut characters: Vec<(char, usize)> = Vec::new();
    let mut end = 0;
    for chunk in raw.utf8_chunks() {
        for character in chunk.valid().chars() {
            end += character.len_utf8();
            characters.push((character, bytes[end - 1].1));
        }
        if !chunk.invalid().is_empty() {
            end += chunk.invalid().len();
            characters.push(('\u{fffd}', bytes[end - 1].1));
        }
    }
    // A character that may still become whole is not searched.
    let whole = characters.len() - usize::from(ends_inside_a_character(&raw));

    let text: String = characters.iter().map(|&(character, _)| character).collect();
    for num in 1..=whole {
        let so_far: String = characters[..num].iter().map(|&(character, _)| character).collect();
        let token = characters[num - 1].1;
        let longest = stops
            .iter()
            .enumerate()
            .filter(|(_, stop)| token > options.min_tokens && so_far.ends_with(stop.as_str()))
            .max_by_key(|&(index, stop)| (stop.len(), usize::MAX - index));
        if let Some((index, stop)) = longest {
            let kept = if options.include_stop_str_in_output { 0 } else { stop.len() };
            return (so_far[..so_far.len() - kept].to_owned(), Some((index, token)));
        }
    }
    (text, None)
}

/// Whether some more bytes could turn the end of `raw` into a character.
fn ends_inside_a_character(raw: &[u8]) -> bool {
    let mut rest = raw;
    while let Err(error) = std::str::from_utf8(rest) {
        let Some(length) = error.error_len() else {
            return true;
        };
        rest = &rest[error.valid_up_to() + length..];
    }
    false
}

fn longest_beginning(text: &str, stops: &[String]) -> usize {
    stops
        .iter()
        .flat_map(|stop| stop.char_indices().map(|(at, _)| &stop[..at]).chain([stop.as_str()]))
        .filter(|beginning| text.ends_with(beginning))
        .map(str::len)
        .max()
        .unwrap_or(0)
}

fn stop_strings() -> impl Strategy<Value = Vec<String>> {
    let string = vec(prop::sample::select(&LETTERS[..]), 1..5).prop_map(|letters| letters.concat());
    vec(string, 0..5)
}

fn options() -> impl Strategy<Value = DetokenizerOptions> {
    (any::<bool>(), any::<bool>(), 0usize..4, any::<bool>()).prop_map(
        |(skip_special_tokens, include_stop_str_in_output, min_tokens, strip_leading_space)| {
            DetokenizerOptions {
                skip_special_tokens,
                include_stop_str_in_output,
                min_tokens,
                strip_leading_space,
            }
        },
    )
}

fn detokenizer(stops: &[String], options: DetokenizerOptions) -> Detokenizer {
    let table = TokenTable::new(PIECES, &[SPECIAL]);
    Detokenizer::new(Arc::new(table), Arc::new(StopStrings::new(stops).unwrap()), options)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn deltas_add_up_to_the_model(
        tokens in vec(0..PIECES.len() as u32, 0..24),
        stops in stop_strings(),
        options in options(),
        cuts in vec(0usize..4, 24),
    ) {
        let mut detokenizer = detokenizer(&stops, options);
        let mut text = String::new();
        let mut stop = None;
        let mut rest = &tokens[..];
        for cut in cuts {
            let (now, later) = rest.split_at(cut.min(rest.len()));
            stop = detokenizer.push(now, &mut text);
            rest = later;
        }
        stop = detokenizer.push(rest, &mut text).or(stop);
        detokenizer.finish(&mut text);

        let got = (text, stop.map(|stop| (stop.index, stop.num_tokens_kept)));
        prop_assert_eq!(got, model(&tokens, &stops, options));
    }

    /// Nothing is held that could go out, and nothing goes out that could be taken back.
    #[test]
    fn what_is_held_is_exactly_the_beginning_of_a_stop_string(
        tokens in vec(0..PIECES.len() as u32, 0..24),
        stops in stop_strings(),
    ) {
        let options = DetokenizerOptions { min_tokens: usize::MAX, ..Default::default() };
        let mut streamed = detokenizer(&stops, options);
        let mut whole = detokenizer(&[], options);
        let (mut emitted, mut text) = (String::new(), String::new());
        for token in tokens {
            streamed.push(&[token], &mut emitted);
            whole.push(&[token], &mut text);
            prop_assert_eq!(&emitted, &text[..text.len() - longest_beginning(&text, &stops)]);
        }
    }
}
