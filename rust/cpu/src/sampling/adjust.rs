//! What changes a row of logits before a token is taken from it.
//!
//! In vLLM's order: allowed tokens, end tokens masked before `min_tokens`, biases, then penalties.

use super::counts::TokenCounts;
use super::record::Record;
use super::slots::Slot;

const MASKED: f32 = f32::NEG_INFINITY;

/// `out` = `logits` of `slot`'s sequence, adjusted for its token at `position`.
pub(super) fn adjust(logits: &[f32], slot: &Slot, position: i32, out: &mut [f32]) {
    let record = &slot.record;
    if record.allowed.is_empty() {
        out.copy_from_slice(logits);
    } else {
        out.fill(MASKED);
        for &token in &record.allowed {
            out[token as usize] = logits[token as usize];
        }
    }
    if position - slot.num_prompt_tokens < record.min_tokens {
        for &token in &record.end_tokens {
            out[token as usize] = MASKED;
        }
    }
    for &(token, amount) in &record.biases {
        out[token as usize] += amount;
    }
    if let Some(counts) = &slot.counts {
        penalize(out, record, counts);
    }
}

/// Penalties touch only tokens that the sequence has.
fn penalize(logits: &mut [f32], record: &Record, counts: &TokenCounts) {
    let factor = record.repetition_penalty;
    for (token, count) in counts.iter() {
        let logit = &mut logits[token];
        *logit = if *logit > 0.0 { *logit / factor } else { *logit * factor };
        // A count may need more bits than a float has.
        let frequency = f64::from(record.frequency_penalty) * f64::from(count);
        *logit = (f64::from(*logit) - frequency) as f32;
        *logit -= record.presence_penalty * f32::from(u8::from(count > 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCAB: usize = 8;

    fn plain() -> Record {
        Record {
            temperature: 0.0,
            top_p: 1.0,
            min_p: 0.0,
            top_k: 0,
            min_tokens: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            is_greedy: true,
            num_logprobs: -1,
            num_prompt_logprobs: -1,
            end_tokens: vec![1, 6],
            biases: Vec::new(),
            allowed: Vec::new(),
        }
    }

    /// The row `[-3, -2, -1, 0, 1, 2, 3, 4]` adjusted for the token after `prompt` and `output`.
    fn adjusted(record: Record, prompt: &[i32], output: &[i32]) -> [f32; VOCAB] {
        let mut counts = TokenCounts::new(VOCAB);
        for &token in prompt {
            counts.add_prompt(token);
        }
        for &token in output {
            counts.add_output(token);
        }
        let slot = Slot {
            counts: record.is_penalized().then_some(counts),
            record,
            request: 7,
            index: 0,
            num_prompt_tokens: prompt.len() as i32,
            prompt: Vec::new(),
        };
        let logits: Vec<f32> = (0..VOCAB).map(|token| token as f32 - 3.0).collect();
        let mut out = [f32::NAN; VOCAB];
        adjust(&logits, &slot, (prompt.len() + output.len()) as i32, &mut out);
        out
    }

    #[test]
    fn rows_are_those_worked_out_by_hand() {
        let no = f32::NEG_INFINITY;
        let cases: [(&str, Record, [f32; VOCAB]); 8] = [
            ("nothing", plain(), [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0]),
            (
                "allowed",
                Record { allowed: vec![7, 2], ..plain() },
                [no, no, -1.0, no, no, no, no, 4.0],
            ),
            (
                "a bias, on a masked token too",
                Record { allowed: vec![7, 2], biases: vec![(2, 9.0), (0, 9.0)], ..plain() },
                [no, no, 8.0, no, no, no, no, 4.0],
            ),
            (
                "min_tokens, three of the output's two",
                Record { min_tokens: 3, biases: vec![(1, 9.0)], ..plain() },
                [-3.0, no, -1.0, 0.0, 1.0, 2.0, no, 4.0],
            ),
            (
                "min_tokens that are reached",
                Record { min_tokens: 2, ..plain() },
                [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0],
            ),
            (
                "repetition",
                Record { repetition_penalty: 2.0, ..plain() },
                [-6.0, -2.0, -1.0, 0.0, 1.0, 1.0, 3.0, 2.0],
            ),
            (
                "frequency and presence, of the output alone",
                Record { frequency_penalty: 0.5, presence_penalty: 4.0, ..plain() },
                [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, -1.0],
            ),
            (
                "all",
                Record {
                    repetition_penalty: 2.0,
                    frequency_penalty: 0.5,
                    presence_penalty: 4.0,
                    biases: vec![(7, 2.0)],
                    ..plain()
                },
                [-6.0, -2.0, -1.0, 0.0, 1.0, 1.0, 3.0, -2.0],
            ),
        ];
        for (name, record, want) in cases {
            let got = adjusted(record, &[0, 5, 5], &[7, 7]);
            assert_eq!(got.map(f32::to_bits), want.map(f32::to_bits), "{name}: {got:?}");
        }
    }
}
