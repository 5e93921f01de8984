//! Products with packed weights, against chains of multiply-adds in plain Rust: bit by bit, for every
//! format, shape, instruction set and number of threads. So no element depends on its company,
//! and a quantized weight gives the bits of its dequantized numbers.

mod common;

use common::blocks::{meaning, random_block};
use common::chains::{chain, is_fused};
use common::{Buffer, DTYPES, Noise, isas, pools};
use fastserve_cpu::{DType, Isa, Packed, Pool, Weight, WeightFormat, gather, linear};

/// Shapes around every edge: rows of a tile, of a block; panels, strips; groups, pieces of K.
const ROWS: [usize; 12] = [1, 2, 3, 4, 5, 6, 7, 12, 13, 29, 192, 200];
const COLUMNS: [usize; 7] = [1, 15, 16, 17, 64, 65, 143];

fn lengths(format: WeightFormat) -> &'static [usize] {
    match format.block_elements() {
        1 => &[1, 3, 4, 5, 127, 128, 129, 255, 259, 576],
        32 => &[32, 64, 256, 288, 576],
        _ => &[256, 512, 768],
    }
}

/// Rows as in a file, and what they mean.
#[derive(Clone)]
struct Stored {
    format: WeightFormat,
    bytes: Vec<u8>,
    numbers: Vec<Vec<f32>>,
}

impl Stored {
    fn new(format: WeightFormat, rows: usize, len: usize, noise: &mut Noise) -> Self {
        let mut bytes = Vec::new();
        let mut numbers = Vec::new();
        for _ in 0..rows {
            let mut row = Vec::new();
            for _ in 0..len / format.block_elements() {
                let block = random_block(format, noise);
                row.extend(meaning(format, &block));
                bytes.extend(block);
            }
            numbers.push(row);
        }
        Self { format, bytes, numbers }
    }

    fn packed(&self) -> Packed {
        let (rows, len) = (self.numbers.len(), self.numbers[0].len());
        let mut packed = Packed::new(self.format, rows, len).unwrap();
        // In pieces of several rows and of one.
        let half = rows / 2 * packed.row_bytes();
        packed.fill(0, &self.bytes[..half]).unwrap();
        for (row, bytes) in (rows / 2..).zip(self.bytes[half..].chunks(packed.row_bytes())) {
            packed.fill(row, bytes).unwrap();
        }
        packed
    }
}

struct Case {
    parts: Vec<Stored>,
    rows: usize,
    x_dtype: DType,
    out_dtype: DType,
    bias: Option<DType>,
}

fn check(case: &Case, pool: &Pool, noise: &mut Noise) {
    let len = case.parts[0].numbers[0].len();
    let numbers: Vec<&Vec<f32>> = case.parts.iter().flat_map(|part| &part.numbers).collect();
    let weight = Weight::new(case.parts.iter().map(Stored::packed).collect()).unwrap();
    let x = Buffer::noise(case.x_dtype, case.rows, len, 3, noise);
    let bias = case.bias.map(|dtype| Buffer::noise(dtype, 1, numbers.len(), 0, noise));
    let mut out = Buffer::poisoned(case.out_dtype, case.rows, numbers.len(), 5);
    let before = out.clone();
    let bias_view = bias.as_ref().map(Buffer::view);
    linear(pool, &x.view(), &weight, bias_view.as_ref(), &mut out.view_mut()).unwrap();
    out.assert_guards(&before);
    let mut want = Buffer::poisoned(case.out_dtype, 1, 1, 0);
    for row in 0..case.rows {
        let x: Vec<f32> = (0..len).map(|k| x.get(row, k)).collect();
        for (col, w) in numbers.iter().enumerate() {
            let bias = bias.as_ref().map(|bias| bias.get(0, col));
            want.set(0, 0, chain(is_fused(pool.isa()), &x, w, bias));
            let (got, want) = (out.get(row, col), want.get(0, 0));
            assert_eq!(
                got.to_bits(),
                want.to_bits(),
                "{:?}, {} rows of {len}, {pool:?}: [{row}, {col}] is {got}, want {want}",
                weight.parts(),
                case.rows
            );
        }
    }
}

#[test]
fn every_format_and_shape() {
    let mut noise = Noise::new(1);
    let pools = pools();
    for format in WeightFormat::OF_FILES {
        for &len in lengths(format) {
            let all = Stored::new(format, 143, len, &mut noise);
            for columns in COLUMNS {
                // All row counts with the last width, some with each.
                let rows = ROWS.into_iter().enumerate();
                let some = rows.filter(|&(i, _)| columns == 143 || (i + columns) % 4 == 0);
                for (i, rows) in some.filter(|&(_, rows)| rows * len <= 60_000) {
                    let bytes = all.bytes.len() / 143 * columns;
                    let part = Stored {
                        format,
                        bytes: all.bytes[..bytes].to_vec(),
                        numbers: all.numbers[..columns].to_vec(),
                    };
                    let bias = [None, Some(DType::F32), Some(DType::Bf16)][(i + columns) % 3];
                    let (x_dtype, out_dtype) = (DTYPES[i / 2 % 2], DTYPES[columns / 2 % 2]);
                    let case = Case { parts: vec![part], rows, x_dtype, out_dtype, bias };
                    check(&case, &pools[(i + columns + len) % pools.len()], &mut noise);
                }
            }
        }
    }
}

#[test]
fn parts_of_several_formats() {
    let mut noise = Noise::new(2);
    for pool in pools() {
        for (rows, x_dtype) in [1, 3, 6, 21].into_iter().flat_map(|n| DTYPES.map(|d| (n, d))) {
            let part = |format, rows, noise: &mut Noise| Stored::new(format, rows, 256, noise);
            let case = Case {
                parts: vec![
                    part(WeightFormat::Q4K, 70, &mut noise),
                    part(WeightFormat::Q6K, 1, &mut noise),
                    part(WeightFormat::Bf16, 33, &mut noise),
                    part(WeightFormat::F32, 33, &mut noise),
                    part(WeightFormat::Q8_0, 16, &mut noise),
                ],
                rows,
                x_dtype,
                out_dtype: DType::F32,
                bias: Some(DType::F32),
            };
            check(&case, &pool, &mut noise);
        }
    }
}

/// Rows of `x` that lie a multiple of 4 KiB apart, or nearly, are copied before they are used.
#[test]
fn rows_in_the_same_sets_of_a_cache() {
    let mut noise = Noise::new(8);
    let pools = pools();
    for (format, len) in [
        (WeightFormat::F32, 1021),
        (WeightFormat::F32, 1010),
        (WeightFormat::Bf16, 1023),
        (WeightFormat::Q8_0, 1024),
        (WeightFormat::Q4_1, 1024),
        (WeightFormat::Q6K, 1024),
    ] {
        let part = Stored::new(format, 33, len, &mut noise);
        for (rows, x_dtype) in [5, 29, 193].into_iter().flat_map(|n| DTYPES.map(|d| (n, d))) {
            let parts = vec![part.clone()];
            let case = Case { parts, rows, x_dtype, out_dtype: DType::F32, bias: None };
            check(&case, &pools[rows % pools.len()], &mut noise);
        }
    }
}

/// Threads share a product out; each element is still computed whole, by one of them.
#[test]
fn large_enough_to_be_shared() {
    let mut noise = Noise::new(3);
    let part = Stored::new(WeightFormat::Q4_1, 1000, 576, &mut noise);
    for isa in isas() {
        for threads in [1, 2, 5] {
            let case = Case {
                parts: vec![part.clone()],
                rows: 3,
                x_dtype: DType::F32,
                out_dtype: DType::F32,
                bias: None,
            };
            check(&case, &Pool::new(threads, isa), &mut noise);
        }
    }
}

/// A row with NaN or infinity makes its own results so, and no other's.
#[test]
fn what_is_not_finite_stays_in_its_row() {
    let mut noise = Noise::new(4);
    let part = Stored::new(WeightFormat::Bf16, 40, 37, &mut noise);
    let weight = Weight::new(vec![part.packed()]).unwrap();
    for pool in pools() {
        for (rows, dtype) in [2, 5, 9].into_iter().flat_map(|n| DTYPES.map(|d| (n, d))) {
            let mut x = Buffer::noise(dtype, rows, 37, 0, &mut noise);
            x.set(0, 36, f32::NAN);
            x.set(1, 0, f32::INFINITY);
            let mut out = Buffer::poisoned(DType::F32, rows, 40, 0);
            linear(&pool, &x.view(), &weight, None, &mut out.view_mut()).unwrap();
            for col in 0..40 {
                assert!(out.get(0, col).is_nan() && !out.get(1, col).is_finite());
                assert!((2..rows).all(|row| out.get(row, col).is_finite()));
            }
        }
    }
}

#[test]
fn no_rows() {
    let mut noise = Noise::new(5);
    let weight = Weight::new(vec![Stored::new(WeightFormat::Bf16, 3, 5, &mut noise).packed()]);
    let mut out = Buffer::poisoned(DType::F32, 0, 3, 0);
    for (pool, dtype) in pools().iter().flat_map(|pool| DTYPES.map(|d| (pool, d))) {
        let x = Buffer::noise(dtype, 0, 5, 0, &mut noise);
        linear(pool, &x.view(), weight.as_ref().unwrap(), None, &mut out.view_mut()).unwrap();
    }
}

/// Rows of every part, in any order and repeated, are the numbers themselves.
#[test]
fn gathered_rows() {
    let mut noise = Noise::new(8);
    for format in WeightFormat::OF_FILES {
        for &len in lengths(format) {
            let parts = [19, 1, 33].map(|rows| Stored::new(format, rows, len, &mut noise));
            let weight = Weight::new(parts.iter().map(Stored::packed).collect()).unwrap();
            let numbers: Vec<&Vec<f32>> = parts.iter().flat_map(|part| &part.numbers).collect();
            let rows: Vec<i32> = [0, 52, 18, 19, 20, 35, 36, 0, 7].into();
            for pool in pools() {
                for dtype in DTYPES {
                    let mut out = Buffer::poisoned(dtype, rows.len(), len, 2);
                    let (before, mut want) = (out.clone(), Buffer::poisoned(dtype, 1, len, 0));
                    gather(&pool, &weight, &rows, &mut out.view_mut()).unwrap();
                    out.assert_guards(&before);
                    for (i, &row) in rows.iter().enumerate() {
                        for (k, &number) in numbers[row as usize].iter().enumerate() {
                            want.set(0, k, number);
                        }
                        assert_eq!(out.row_bits(i), want.row_bits(0), "{format:?} row {row}");
                    }
                }
            }
        }
    }
}

#[test]
fn refusals_name_the_argument() {
    let text = |result: Result<(), fastserve_cpu::ArgumentError>| result.unwrap_err().to_string();
    let packed = |rows, cols| Packed::new(WeightFormat::Q8_0, rows, cols);
    for (rows, cols, want) in [
        (1, 33, "num_cols: got 33, want a multiple of 32, which Q8_0 has to a block, to 2^24"),
        (1, 0, "num_cols: got 0, want a multiple of 32, which Q8_0 has to a block, to 2^24"),
        (0, 32, "num_rows: got 0, want 1 to 2^32"),
    ] {
        assert_eq!(packed(rows, cols).unwrap_err().to_string(), want);
    }
    let all = Packed::new(WeightFormat::F32, 1 << 32, 1 << 24).unwrap_err().to_string();
    assert!(
        all.starts_with("num_rows: got 4294967296, which take 288230376151711744 bytes"),
        "{all}"
    );
    let mut two = packed(2, 64).unwrap();
    assert_eq!(
        text(two.fill(0, &[0; 67])),
        "rows: got 67 bytes from row 0 on, want rows of 68 bytes, to row 2 at most"
    );
    assert_eq!(
        text(two.fill(1, &[0; 136])),
        "rows: got 136 bytes from row 1 on, want rows of 68 bytes, to row 2 at most"
    );
    assert!(two.fill(usize::MAX, &[0; 68]).is_err());
    assert_eq!(
        text(Weight::new(vec![packed(1, 32).unwrap(), packed(1, 64).unwrap()]).map(|_| ())),
        "parts: got 2 with 32, 64 columns, want at least one, all with as many columns"
    );
    assert!(Weight::new(Vec::new()).is_err());

    let weight = Weight::new(vec![two]).unwrap();
    let pool = Pool::new(1, Isa::Portable);
    let mut noise = Noise::new(6);
    let x = Buffer::noise(DType::F32, 2, 64, 0, &mut noise);
    let short = Buffer::noise(DType::F32, 2, 63, 0, &mut noise);
    let bias = Buffer::noise(DType::F32, 1, 3, 0, &mut noise);
    let mut out = Buffer::poisoned(DType::F32, 2, 2, 0);
    let mut wide = Buffer::poisoned(DType::F32, 2, 3, 0);
    let got = text(linear(&pool, &short.view(), &weight, None, &mut out.view_mut()));
    assert_eq!(got, "x: got [2, 63] float32, want 64 columns, as many as the weight has");
    let got = text(linear(&pool, &x.view(), &weight, None, &mut wide.view_mut()));
    assert_eq!(got, "out: got [2, 3] float32, want [2, 2]");
    for (row, want) in [(2, "rows: got 2, want 0 to 1"), (-1, "rows: got -1, want 0 to 1")] {
        let mut out = Buffer::poisoned(DType::F32, 1, 64, 0);
        assert_eq!(text(gather(&pool, &weight, &[row], &mut out.view_mut())), want);
    }
    let got = text(gather(&pool, &weight, &[0], &mut out.view_mut()));
    assert_eq!(got, "out: got [2, 2] float32, want [1, 64]");
    let (x, bias) = (x.view(), bias.view());
    let got = text(linear(&pool, &x, &weight, Some(&bias), &mut out.view_mut()));
    assert_eq!(got, "bias: got [1, 3] float32, want [2]");
}

/// Against products in `f64`: 768 numbers are six chains of 128, so at most 134 roundings.
#[test]
fn close_to_exact() {
    let mut noise = Noise::new(7);
    for format in WeightFormat::OF_FILES {
        let part = Stored::new(format, 48, 768, &mut noise);
        let weight = Weight::new(vec![part.packed()]).unwrap();
        for (pool, dtype) in pools().iter().flat_map(|pool| DTYPES.map(|d| (pool, d))) {
            let x = Buffer::noise(dtype, 9, 768, 0, &mut noise);
            let mut out = Buffer::poisoned(DType::F32, 9, 48, 0);
            linear(pool, &x.view(), &weight, None, &mut out.view_mut()).unwrap();
            for row in 0..9 {
                for (col, w) in part.numbers.iter().enumerate() {
                    let terms =
                        w.iter().enumerate().map(|(k, &w)| f64::from(x.get(row, k)) * f64::from(w));
                    let terms: Vec<f64> = terms.collect();
                    let want: f64 = terms.iter().sum();
                    let size: f64 = terms.iter().map(|term| term.abs()).sum();
                    let error = (f64::from(out.get(row, col)) - want).abs();
                    assert!(error <= 134.0 * 6e-8 * size, "{format:?} {pool:?}: off by {error:e}");
                }
            }
        }
    }
}
