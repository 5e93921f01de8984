//! Products with weights of int8, against their definition in plain Rust: bit by bit, for every shape,
//! instruction set and number of threads. So no element depends on its company or on the machine.

mod common;

use common::{Buffer, DTYPES, Noise, pools};
use fastserve_cpu::{
    ArgumentError, DType, Isa, Packed, Pool, Weight, WeightFormat, decode, gather, linear,
};

/// Rows and outputs around every edge of a tile, a block and a strip; lengths around every edge of a
/// vector, and one whose blocks are of few rows.
const ROWS: [usize; 12] = [1, 2, 3, 4, 5, 7, 11, 12, 13, 25, 109, 130];
const COLUMNS: [usize; 7] = [1, 15, 16, 17, 33, 65, 143];
const LENGTHS: [usize; 14] = [1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 130, 259, 576, 5001];

/// A row by the definition: what it is multiplied as.
struct Row {
    scale: f32,
    numbers: Vec<i64>,
}

impl Row {
    fn of(row: &[f32]) -> Self {
        let numbers = vec![0; row.len()];
        if !row.iter().all(|number| number.is_finite()) {
            return Self { scale: f32::NAN, numbers };
        }
        let scale = row.iter().fold(0.0, |most: f32, number| most.max(number.abs())) / 127.0;
        if scale == 0.0 {
            return Self { scale, numbers };
        }
        let near = |number: f32| (number / scale).round_ties_even().clamp(-127.0, 127.0);
        Self { scale, numbers: row.iter().map(|&number| near(number) as i64).collect() }
    }

    fn times(&self, other: &Self, bias: Option<f32>) -> f32 {
        let sum: i64 = self.numbers.iter().zip(&other.numbers).map(|(x, w)| x * w).sum();
        let value = sum as f32 * (self.scale * other.scale);
        bias.map_or(value, |bias| value + bias)
    }
}

fn rows_of(x: &Buffer) -> Vec<Vec<f32>> {
    (0..x.rows()).map(|row| (0..x.cols()).map(|k| x.get(row, k)).collect()).collect()
}

fn bytes_of(rows: &[Vec<f32>]) -> Vec<u8> {
    rows.iter().flatten().flat_map(|number| number.to_le_bytes()).collect()
}

fn packed(rows: &[Vec<f32>]) -> Packed {
    let mut packed = Packed::new(WeightFormat::I8, rows.len(), rows[0].len()).unwrap();
    // In pieces of several rows and of one.
    let half = rows.len() / 2;
    packed.fill(0, &bytes_of(&rows[..half])).unwrap();
    for (row, numbers) in rows.iter().enumerate().skip(half) {
        packed.fill(row, &bytes_of(std::slice::from_ref(numbers))).unwrap();
    }
    packed
}

fn noise_rows(rows: usize, len: usize, noise: &mut Noise) -> Vec<Vec<f32>> {
    (0..rows).map(|_| (0..len).map(|_| noise.next() * 0.1).collect()).collect()
}

fn assert_same(got: f32, want: f32, what: impl Fn() -> String) {
    let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
    assert!(same, "{}: {got:e}, want {want:e}", what());
}

/// Compare a product with the definition.
fn check(pool: &Pool, x: &Buffer, w: &[Vec<f32>], bias: Option<&Buffer>, out_dtype: DType) {
    let weight = Weight::new(vec![packed(w)]).unwrap();
    let mut out = Buffer::poisoned(out_dtype, x.rows(), w.len(), 5);
    let before = out.clone();
    let bias_view = bias.map(Buffer::view);
    linear(pool, &x.view(), &weight, bias_view.as_ref(), &mut out.view_mut()).unwrap();
    out.assert_guards(&before);
    let columns: Vec<Row> = w.iter().map(|row| Row::of(row)).collect();
    let mut want = Buffer::poisoned(out_dtype, 1, 1, 0);
    for (row, x) in rows_of(x).iter().enumerate() {
        let x = Row::of(x);
        for (col, w) in columns.iter().enumerate() {
            want.set(0, 0, x.times(w, bias.map(|bias| bias.get(0, col))));
            assert_same(out.get(row, col), want.get(0, 0), || {
                format!("{pool:?}, {} positions: [{row}, {col}]", w.numbers.len())
            });
        }
    }
}

#[test]
fn every_shape() {
    let mut noise = Noise::new(1);
    let pools = pools();
    for (i, len) in LENGTHS.into_iter().enumerate() {
        let w = noise_rows(143, len, &mut noise);
        for (j, columns) in COLUMNS.into_iter().enumerate() {
            for (k, rows) in ROWS.into_iter().enumerate() {
                // All of a few lengths, and of the others a sample.
                let all = [3, 17, 130].contains(&len) && rows < 100;
                let small = rows * len * columns <= 2_000_000;
                if !(all || (i + j + k) % 5 == 0 && small || len == 5001 && (j, rows) == (3, 25)) {
                    continue;
                }
                let x = Buffer::noise(DTYPES[(i + k) % 2], rows, len, 3, &mut noise);
                let kind = [None, Some(DType::F32), Some(DType::Bf16)][(j + k) % 3];
                let bias = kind.map(|dtype| Buffer::noise(dtype, 1, columns, 0, &mut noise));
                let pool = &pools[(i + j + k) % pools.len()];
                check(pool, &x, &w[..columns], bias.as_ref(), DTYPES[(j + k / 2) % 2]);
            }
        }
    }
}

#[test]
fn every_set_and_number_of_threads() {
    let mut noise = Noise::new(2);
    let w = noise_rows(1000, 575, &mut noise);
    for isa in Isa::available() {
        for threads in [1, 2, 3, 5] {
            for rows in [1, 3, 14] {
                let x = Buffer::noise(DType::F32, rows, 575, 0, &mut noise);
                check(&Pool::new(threads, isa), &x, &w, None, DType::F32);
            }
        }
    }
}

/// Quotients half way between two integers go to the even one, in `x` and in the weight.
#[test]
fn ties_go_to_even() {
    let ties: Vec<f32> = (0..254).map(|k| k as f32 - 126.5).chain([127.0]).collect();
    let ones: Vec<Vec<f32>> = (0..ties.len())
        .map(|at| (0..ties.len()).map(|k| if k == at { 127.0 } else { 0.0 }).collect())
        .collect();
    for pool in pools() {
        for (x, w) in [(vec![ties.clone()], &ones), (ones.clone(), &vec![ties.clone()])] {
            let mut rows = Buffer::poisoned(DType::F32, x.len(), ties.len(), 0);
            for (row, numbers) in x.iter().enumerate() {
                numbers.iter().enumerate().for_each(|(k, &number)| rows.set(row, k, number));
            }
            check(&pool, &rows, w, None, DType::F32);
            let weight = Weight::new(vec![packed(w)]).unwrap();
            let mut out = Buffer::poisoned(DType::F32, x.len(), w.len(), 0);
            linear(&pool, &rows.view(), &weight, None, &mut out.view_mut()).unwrap();
            for (at, &tie) in ties.iter().enumerate() {
                let got = if x.len() == 1 { out.get(0, at) } else { out.get(at, 0) };
                let want = tie.round_ties_even() * 127.0 + 0.0; // An integer 0 has no sign.
                assert_eq!(got.to_bits(), want.to_bits(), "{tie} {pool:?}: {got}");
            }
        }
    }
}

/// The longest rows of the largest numbers: the sum is as near to 2^31 as it can be.
#[test]
fn the_largest_sums_are_exact() {
    const LEN: usize = 1 << 17;
    let signs = |sign: fn(usize) -> f32| (0..LEN).map(sign).collect::<Vec<f32>>();
    let w: Vec<Vec<f32>> = [
        signs(|_| 1.0),
        signs(|_| -1.0),
        signs(|k| if k % 2 == 0 { 1.0 } else { -1.0 }),
        signs(|k| if k < LEN / 2 { 1.0 } else { -1.0 }),
    ]
    .into();
    let mut x = Buffer::poisoned(DType::F32, 14, LEN, 0);
    for row in 0..14 {
        for (k, &value) in w[row % 4].iter().enumerate() {
            x.set(row, k, value * (row + 1) as f32);
        }
    }
    for pool in pools() {
        check(&pool, &x, &w, None, DType::F32);
        let weight = Weight::new(vec![packed(&w)]).unwrap();
        let mut out = Buffer::poisoned(DType::F32, 14, 4, 0);
        linear(&pool, &x.view(), &weight, None, &mut out.view_mut()).unwrap();
        let want = 2_114_060_288.0 * (1.0 / 127.0 * (1.0 / 127.0_f32));
        assert_eq!(out.row_bits(0), [want, -want, 0.0, 0.0].map(f32::to_bits));
    }
}

/// Rows whose scales are huge, tiny, subnormal or 0, of `x` and of the weight.
#[test]
fn any_magnitude() {
    let mut noise = Noise::new(4);
    let sizes = [3e38, 1e30, 1.0, 1e-30, 1e-38, 3e-43, 2e-43, 1e-44, 1e-45, 0.0];
    let mut x = Buffer::noise(DType::F32, sizes.len(), 37, 0, &mut noise);
    let mut w = noise_rows(sizes.len() + 7, 37, &mut noise);
    for (row, size) in sizes.into_iter().enumerate() {
        for (k, w) in w[row].iter_mut().enumerate() {
            x.set(row, k, x.get(row, k) / 2.0 * size);
            *w = *w * 10.0 * size;
        }
    }
    for pool in pools() {
        check(&pool, &x, &w, None, DType::F32);
        check(&pool, &x, &w, None, DType::Bf16);
    }
}

/// A row with NaN or infinity makes its own results NaN, and changes no bit of another's.
#[test]
fn what_is_not_finite_stays_in_its_row() {
    let mut noise = Noise::new(5);
    let mut w = noise_rows(40, 37, &mut noise);
    w[3] = vec![0.0; 37];
    let weight = Weight::new(vec![packed(&w)]).unwrap();
    let strange = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    for pool in pools() {
        for dtype in DTYPES {
            for rows in [4, 5, 14] {
                let x = Buffer::noise(dtype, rows, 37, 0, &mut noise);
                let mut bad = x.clone();
                for (row, number) in strange.into_iter().enumerate() {
                    bad.set(row, [36, 0, 16][row], number);
                }
                let mut out = Buffer::poisoned(DType::F32, rows, 40, 0);
                linear(&pool, &bad.view(), &weight, None, &mut out.view_mut()).unwrap();
                let mut want = Buffer::poisoned(DType::F32, rows, 40, 0);
                linear(&pool, &x.view(), &weight, None, &mut want.view_mut()).unwrap();
                for col in 0..40 {
                    assert!((0..3).all(|row| out.get(row, col).is_nan()));
                }
                for row in 3..rows {
                    assert_eq!(out.row_bits(row), want.row_bits(row));
                }
                // What was left in memory is not seen by the next product.
                linear(&pool, &x.view(), &weight, None, &mut out.view_mut()).unwrap();
                assert_eq!(out.row_bits(0), want.row_bits(0));
            }
        }
    }
}

#[test]
fn no_rows() {
    let mut noise = Noise::new(6);
    let weight = Weight::new(vec![packed(&noise_rows(3, 4, &mut noise))]).unwrap();
    let x = Buffer::noise(DType::F32, 0, 4, 0, &mut noise);
    for pool in pools() {
        let mut out = Buffer::poisoned(DType::F32, 0, 3, 0);
        linear(&pool, &x.view(), &weight, None, &mut out.view_mut()).unwrap();
    }
}

/// A weight may have parts of other formats too: each part has the bits that it has alone.
#[test]
fn beside_parts_of_other_formats() {
    let mut noise = Noise::new(7);
    let (w, plain) = (noise_rows(70, 36, &mut noise), noise_rows(33, 36, &mut noise));
    let stored = || {
        let mut packed = Packed::new(WeightFormat::F32, 33, 36).unwrap();
        packed.fill(0, &bytes_of(&plain)).unwrap();
        packed
    };
    let both = Weight::new(vec![packed(&w), stored(), packed(&w[..5])]).unwrap();
    let parts = [vec![packed(&w)], vec![stored()], vec![packed(&w[..5])]];
    let parts = parts.map(|part| Weight::new(part).unwrap());
    for pool in pools() {
        for dtype in DTYPES {
            for rows in [1, 6] {
                let x = Buffer::noise(dtype, rows, 36, 0, &mut noise);
                let mut out = Buffer::poisoned(DType::F32, rows, 108, 0);
                linear(&pool, &x.view(), &both, None, &mut out.view_mut()).unwrap();
                let mut first = 0;
                for part in &parts {
                    let mut alone = Buffer::poisoned(DType::F32, rows, part.num_rows(), 0);
                    linear(&pool, &x.view(), part, None, &mut alone.view_mut()).unwrap();
                    for row in 0..rows {
                        let got = &out.row_bits(row)[first..first + part.num_rows()];
                        assert_eq!(got, alone.row_bits(row), "{pool:?} {dtype:?} row {row}");
                    }
                    first += part.num_rows();
                }
            }
        }
    }
}

/// Rows are integers times the scale, rounded once.
#[test]
fn gathered_rows() {
    let mut noise = Noise::new(8);
    for len in [1, 3, 4, 37, 130] {
        let parts = [19, 1, 33].map(|rows| noise_rows(rows, len, &mut noise));
        let weight = Weight::new(parts.iter().map(|part| packed(part)).collect()).unwrap();
        let numbers: Vec<&Vec<f32>> = parts.iter().flatten().collect();
        let rows = [0, 52, 18, 19, 20, 35, 36, 0, 7];
        for pool in pools() {
            for dtype in DTYPES {
                let mut out = Buffer::poisoned(dtype, rows.len(), len, 2);
                let (before, mut want) = (out.clone(), Buffer::poisoned(dtype, 1, len, 0));
                gather(&pool, &weight, &rows, &mut out.view_mut()).unwrap();
                out.assert_guards(&before);
                for (i, &row) in rows.iter().enumerate() {
                    let row = Row::of(numbers[row as usize]);
                    for (k, &number) in row.numbers.iter().enumerate() {
                        want.set(0, k, number as f32 * row.scale);
                    }
                    assert_eq!(out.row_bits(i), want.row_bits(0), "{len} {dtype:?}");
                }
            }
        }
    }
}

/// What quantizing costs: half a step of each factor, times the other. Roundings come on top: one of each
/// scale, and three of the result.
#[test]
fn close_to_exact() {
    let mut noise = Noise::new(9);
    let w = noise_rows(48, 768, &mut noise);
    let weight = Weight::new(vec![packed(&w)]).unwrap();
    let x = Buffer::noise(DType::F32, 9, 768, 0, &mut noise);
    for pool in pools() {
        let mut out = Buffer::poisoned(DType::F32, 9, 48, 0);
        linear(&pool, &x.view(), &weight, None, &mut out.view_mut()).unwrap();
        for (row, x) in rows_of(&x).iter().enumerate() {
            for (col, w) in w.iter().enumerate() {
                let scale = |row: &[f32]| {
                    f64::from(row.iter().fold(0.0, |most: f32, v| most.max(v.abs()))) / 127.0
                };
                let (x_step, w_step) = (scale(x), scale(w));
                let pairs = || x.iter().zip(w).map(|(&x, &w)| (f64::from(x), f64::from(w)));
                let want: f64 = pairs().map(|(x, w)| x * w).sum();
                let size: f64 = pairs().map(|(x, w)| (x * w).abs()).sum();
                let bound: f64 = pairs()
                    .map(|(x, w)| {
                        (x.abs() * w_step + w.abs() * x_step + x_step * w_step / 2.0) / 2.0
                    })
                    .sum();
                let error = (f64::from(out.get(row, col)) - want).abs();
                assert!(
                    error <= bound + 6.0 * 6e-8 * size,
                    "{pool:?}: off by {error:e} of {bound:e}"
                );
                assert!(error <= bound / 8.0, "{pool:?}: {error:e} is no sum of random halves");
            }
        }
    }
}

#[test]
fn refusals_name_the_argument() {
    let text = |result: Result<(), ArgumentError>| result.unwrap_err().to_string();
    let new = |rows, cols| Packed::new(WeightFormat::I8, rows, cols).map(|_| ());
    let want =
        "want a multiple of 1, which I8 has to a block, to 131072, so that sums of I8 fit 32 bits";
    assert_eq!(text(new(1, 131_073)), format!("num_cols: got 131073, {want}"));
    assert_eq!(text(new(1, 0)), format!("num_cols: got 0, {want}"));
    assert_eq!(text(new(0, 4)), "num_rows: got 0, want 1 to 2^32");
    assert!(new(1, 131_072).is_ok());

    let mut two = packed(&[vec![1.0, 2.0, 3.0], vec![4.0, 5.0, 6.0]]);
    assert_eq!(
        text(two.fill(1, &[0; 24])),
        "rows: got 24 bytes from row 1 on, want rows of 12 bytes, to row 2 at most"
    );
    for (number, name) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (-f32::INFINITY, "-inf")] {
        let rows = [vec![7.0, 7.0, 7.0], vec![8.0, 8.0, number]];
        let got = text(two.fill(0, &bytes_of(&rows)));
        assert_eq!(got, format!("rows: got {name}, want finite numbers, for int8"));
    }
    let weight = Weight::new(vec![two]).unwrap();
    let mut out = Buffer::poisoned(DType::F32, 2, 3, 0);
    let pool = Pool::new(1, Isa::Portable);
    gather(&pool, &weight, &[0, 1], &mut out.view_mut()).unwrap();
    assert_eq!((out.get(0, 2), out.get(1, 2)), (127.0 * (3.0 / 127.0), 127.0 * (6.0 / 127.0)));

    let got = text(decode(WeightFormat::I8, &[0; 8], &mut [0.0; 2]));
    assert_eq!(got, "format: got I8, want a format of files, which I8 is not");
}

/// 16 rows of int8, with a scale and a correction of 32 bits each.
#[test]
fn memory_is_a_byte_a_number() {
    for (rows, cols) in [(16, 64), (17, 64), (1, 1), (160, 576)] {
        let packed = Packed::new(WeightFormat::I8, rows, cols).unwrap();
        let (rows, cols) = (rows.next_multiple_of(16), cols.next_multiple_of(4));
        assert_eq!(packed.num_bytes(), rows * cols + rows * 8);
    }
}
