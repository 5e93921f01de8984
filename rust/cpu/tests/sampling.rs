//! Sampling against plain references: every instruction set, any number of threads, odd shapes.

mod common;

use common::{Buffer, Noise, pools};
use fastserve_cpu::{
    ArgumentError, BestToken, DType, Draws, Isa, Matrix, Pool, best_tokens, draw_bits, draw_tokens,
    philox4x32, row_logprobs,
};

/// Columns around the sizes of vectors, blocks and items.
const COLS: [usize; 10] = [1, 2, 15, 16, 17, 255, 257, 1000, 8192, 9001];

/// Noise with equals in it, rows apart from each other.
fn logits(rows: usize, cols: usize) -> Buffer {
    let mut noise = Noise::new((rows * 10_007 + cols) as u64);
    let mut logits = Buffer::noise(DType::F32, rows, cols, 3, &mut noise);
    for row in 0..rows {
        for col in 0..cols {
            let value = logits.get(row, col) * 4.0;
            logits.set(row, col, if row % 2 == 1 { value.round() } else { value });
        }
    }
    logits
}

fn row_of(logits: &Buffer, row: usize) -> Vec<f32> {
    (0..logits.cols()).map(|col| logits.get(row, col)).collect()
}

/// Columns, the largest value first, equals in order.
fn order(row: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).unwrap());
    order
}

/// Settings of a draw from each row, some of each kind.
struct Settings {
    rows: Vec<i32>,
    temperature: Vec<f32>,
    top_k: Vec<i32>,
    top_p: Vec<f32>,
    min_p: Vec<f32>,
    bits: Vec<u64>,
}

impl Settings {
    fn new(num: usize, num_rows: usize) -> Self {
        let row = |i: usize| (i % num_rows.max(1)) as i32;
        Self {
            rows: (0..num).map(row).collect(),
            temperature: (0..num).map(|i| [0.01, 0.7, 1.0, 100.0][i % 4]).collect(),
            top_k: (0..num).map(|i| [0, -1, 1, 20, 5000][i % 5]).collect(),
            top_p: (0..num).map(|i| [1.0, 0.95, 1e-9][i % 3]).collect(),
            min_p: (0..num).map(|i| [0.0, 0.0, 0.02, 1.0][i / 3 % 4]).collect(),
            bits: (0..num).map(|i| draw_bits(5, i as u32, 9)).collect(),
        }
    }

    /// Those of some draws.
    fn only(&self, draws: &[usize]) -> Self {
        fn only<T: Copy>(values: &[T], draws: &[usize]) -> Vec<T> {
            draws.iter().map(|&i| values[i]).collect()
        }
        Self {
            rows: only(&self.rows, draws),
            temperature: only(&self.temperature, draws),
            top_k: only(&self.top_k, draws),
            top_p: only(&self.top_p, draws),
            min_p: only(&self.min_p, draws),
            bits: only(&self.bits, draws),
        }
    }

    fn view(&self) -> Draws<'_> {
        Draws {
            rows: &self.rows,
            temperature: &self.temperature,
            top_k: &self.top_k,
            top_p: &self.top_p,
            min_p: &self.min_p,
            bits: &self.bits,
        }
    }

    /// What draw `i` should give: everything sorted, and sums one by one.
    fn want(&self, i: usize, logits: &Buffer) -> i32 {
        let z: Vec<f32> = row_of(logits, self.rows[i] as usize)
            .into_iter()
            .map(|logit| logit / self.temperature[i])
            .collect();
        let order = order(&z);
        let one = 2f64.powi(40);
        let best = f64::from(z[order[0]]);
        let last = match usize::try_from(self.top_k[i]) {
            Ok(k) if k > 0 && k < z.len() => z[order[k - 1]],
            _ => f32::NEG_INFINITY,
        };
        let weigh = |&z: &f32| {
            let weight = ((f64::from(z) - best).exp() * one).round_ties_even();
            let is_kept = z >= last && weight >= f64::from(self.min_p[i]) * one;
            if is_kept { weight as u64 } else { 0 }
        };
        let mut weights: Vec<u64> = z.iter().map(weigh).collect();
        if self.top_p[i] < 1.0 {
            let total: u64 = weights.iter().sum();
            let target = ((f64::from(self.top_p[i]) * total as f64) as u64).max(1);
            let mut before = 0;
            for token in order {
                let weight = weights[token];
                weights[token] = if before < target { weight } else { 0 };
                before += weight;
            }
        }
        let total: u64 = weights.iter().sum();
        let target = ((u128::from(total) * u128::from(self.bits[i])) >> 64) as u64;
        let mut running = 0;
        let place = weights.iter().position(|weight| {
            running += weight;
            running > target
        });
        place.expect("the best token is kept") as i32
    }
}

#[test]
fn the_best_token_of_each_row() {
    for cols in COLS {
        for rows in [0, 1, 7] {
            let mut logits = logits(rows, cols);
            for (row, value) in [(1, f32::NAN), (3, f32::INFINITY), (5, f32::NEG_INFINITY)] {
                if row < rows {
                    logits.set(row, cols / 2, value);
                }
            }
            for pool in pools() {
                let found = best_tokens(&pool, &logits.view()).unwrap();
                assert_eq!(found.len(), rows);
                for (row, best) in found.into_iter().enumerate() {
                    let mut values = row_of(&logits, row);
                    let what = format!("{pool:?} row {row} of {rows} x {cols}");
                    assert_eq!(best.is_finite, values.iter().all(|x| x.is_finite()), "{what}");
                    assert_eq!(best.logit.is_nan(), values.iter().any(|x| x.is_nan()), "{what}");
                    values.iter_mut().filter(|x| x.is_nan()).for_each(|x| *x = f32::MIN);
                    let want = order(&values)[0];
                    assert!(best.logit.is_nan() || best.logit >= values[want], "{what}");
                    assert!(best.logit.is_nan() || best.token == want as i32, "{what}");
                    assert!((0..cols as i32).contains(&best.token), "{what}");
                }
            }
        }
    }
}

#[test]
fn both_zeros_are_equal_and_huge_is_finite() {
    let rows = [[-0.0f32, 0.0, -0.0], [3e38, 3e38, 3e38]].concat();
    let best = best_tokens(&Pool::new(1, Isa::detect()), &Matrix::f32(&rows, 3)).unwrap();
    let want = |logit| BestToken { token: 0, logit, is_finite: true };
    assert_eq!(best, [want(0.0), want(3e38)]);
}

#[test]
fn draws() {
    for cols in COLS {
        let (logits, settings) = (logits(4, cols), Settings::new(60, 4));
        let want: Vec<i32> = (0..60).map(|i| settings.want(i, &logits)).collect();
        for pool in pools() {
            let got = draw_tokens(&pool, &logits.view(), &settings.view()).unwrap();
            assert_eq!(got, want, "{pool:?} {cols} columns");
        }
        let pool = Pool::new(2, Isa::detect());
        for (i, &want) in want.iter().enumerate() {
            let alone = draw_tokens(&pool, &logits.view(), &settings.only(&[i]).view()).unwrap();
            assert_eq!(alone, [want], "draw {i} alone");
        }
        let none = draw_tokens(&pool, &logits.view(), &settings.only(&[]).view()).unwrap();
        assert_eq!(none, []);
    }
}

#[test]
fn log_probabilities() {
    for cols in COLS {
        let logits = logits(5, cols);
        let rows: Vec<i32> = vec![0, 1, 2, 3, 4, 1];
        let chosen: Vec<i32> = (0..6).map(|i| (i * 7 % cols) as i32).collect();
        let num_best = [0, 1, 3, 20, cols as i32 + 1, 5];
        let run = |pool: &Pool, only: &[usize]| {
            let [rows, chosen, num_best] = [&rows[..], &chosen, &num_best]
                .map(|values| only.iter().map(|&i| values[i]).collect::<Vec<i32>>());
            row_logprobs(pool, &logits.view(), &rows, &chosen, &num_best).unwrap()
        };
        let all: Vec<usize> = (0..6).collect();
        let found = run(&Pool::new(1, Isa::Portable), &all);
        for (i, got) in found.iter().enumerate() {
            let row = row_of(&logits, rows[i] as usize);
            let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            let own = row[chosen[i] as usize];
            assert_eq!(got.rank, 1 + row.iter().filter(|&&x| x > own).count());
            let best = order(&row).into_iter().take(num_best[i] as usize);
            let want: Vec<i32> =
                std::iter::once(chosen[i]).chain(best.map(|col| col as i32)).collect();
            assert_eq!(got.token_ids, want, "row {i} of {cols} columns");
            for (&token, &value) in got.token_ids.iter().zip(&got.logprobs) {
                let want = f64::from(row[token as usize]) - sum.ln();
                assert!((f64::from(value) - want).abs() < 1e-6, "{value}, want {want}");
            }
        }
        for pool in pools() {
            assert_eq!(run(&pool, &all), found, "{pool:?} {cols} columns");
            for i in 0..6 {
                assert_eq!(run(&pool, &[i]), found[i..=i], "{pool:?} row {i} alone");
            }
        }
        assert!(run(&Pool::new(2, Isa::detect()), &[]).is_empty());
    }
}

#[test]
fn philox_has_the_known_answers_of_random123() {
    let ones = u32::MAX;
    for (counter, key, want) in [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([ones; 4], [ones; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ] {
        assert_eq!(philox4x32(counter, key), want);
    }
    let [low, high, ..] = philox4x32([9, 4, 0, 0], [5, 2]);
    assert_eq!(draw_bits(5 | (2 << 32), 4, 9), u64::from(low) | (u64::from(high) << 32));
}

/// An argument, and what makes it wrong.
type Wrong = (&'static str, fn(&mut Settings));

/// The message that arguments are refused with.
fn refusal<T: std::fmt::Debug>(result: Result<T, ArgumentError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn wrong_arguments_are_refused_by_name() {
    let pool = Pool::new(1, Isa::detect());
    let logits = logits(2, 3);
    let narrow = Buffer::poisoned(DType::Bf16, 2, 3, 0);
    let settings = Settings::new(2, 2);
    let draw = |change: fn(&mut Settings)| {
        let mut changed = settings.only(&[0, 1]);
        change(&mut changed);
        refusal(draw_tokens(&pool, &logits.view(), &changed.view()))
    };
    let wanted_logits =
        "logits: got [2, 3] bfloat16 (as uint16), want float32 with 1 to 8388608 columns";
    assert_eq!(refusal(best_tokens(&pool, &narrow.view())), wanted_logits);
    assert_eq!(refusal(draw_tokens(&pool, &narrow.view(), &settings.view())), wanted_logits);
    assert_eq!(draw(|s| s.rows[1] = 2), "rows: got 2 at 1, want 0 to 1");
    assert_eq!(draw(|s| s.rows[0] = -1), "rows: got -1 at 0, want 0 to 1");
    let cases: [Wrong; 5] = [
        ("temperature", |s| s.temperature.truncate(1)),
        ("top_k", |s| s.top_k.truncate(1)),
        ("top_p", |s| s.top_p.truncate(1)),
        ("min_p", |s| s.min_p.truncate(1)),
        ("bits", |s| s.bits.truncate(1)),
    ];
    for (name, change) in cases {
        assert_eq!(draw(change), format!("{name}: got 1 values, want one for each of rows, 2"));
    }

    let score = |rows: &[i32], chosen: &[i32], num_best: &[i32]| {
        refusal(row_logprobs(&pool, &logits.view(), rows, chosen, num_best))
    };
    assert_eq!(refusal(row_logprobs(&pool, &narrow.view(), &[], &[], &[])), wanted_logits);
    assert_eq!(score(&[2], &[0], &[0]), "rows: got 2 at 0, want 0 to 1");
    assert_eq!(score(&[0, 0], &[0, 3], &[0, 0]), "chosen: got 3 at 1, want 0 to 2");
    assert_eq!(score(&[0], &[], &[0]), "chosen: got 0 values, want one for each of rows, 1");
    assert_eq!(score(&[0], &[0], &[]), "num_best: got 0 values, want one for each of rows, 1");
    assert_eq!(score(&[0, 0], &[0, 0], &[4, -2]), "num_best: got -2 at 1, want at least 0");
}
