//! Products with a norm in front or a gate behind: the bits of one operation after the other.

mod common;

use common::blocks::random_block;
use common::{Buffer, DTYPES, Noise, pools};
use fastserve_cpu::{
    DType, Matrix, MatrixMut, Norm, Packed, Pool, Weight, WeightFormat, linear, linear_silu_mul,
    rms_norm, silu_mul,
};

/// Around few rows, tiles, and the blocks that a gated product takes.
const ROWS: [usize; 8] = [0, 1, 3, 5, 29, 192, 193, 389];

/// Columns of the gate: around panels and strips, and several items.
const HALVES: [usize; 6] = [1, 16, 63, 64, 143, 400];

const FORMATS: [WeightFormat; 5] = [
    WeightFormat::Q8_0,
    WeightFormat::Q4_1,
    WeightFormat::F32,
    WeightFormat::Bf16,
    WeightFormat::I8,
];

fn packed(format: WeightFormat, rows: usize, len: usize, noise: &mut Noise) -> Packed {
    let mut packed = Packed::new(format, rows, len).unwrap();
    let blocks = rows * len / format.block_elements();
    let bytes: Vec<u8> = (0..blocks).flat_map(|_| random_block(format, noise)).collect();
    packed.fill(0, &bytes).unwrap();
    packed
}

/// What is in front of a product.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Front {
    Nothing,
    Norm,
    ResidualAndNorm,
}

/// A product, and all that it reads.
struct Case {
    front: Front,
    x: Buffer,
    residual: Buffer,
    norm_weight: Buffer,
    weight: Weight,
    bias: Option<Buffer>,
    out_dtype: DType,
}

impl Case {
    fn new(i: usize, rows: usize, half: usize, noise: &mut Noise) -> Self {
        // Blocks of 32, or very short rows.
        let (len, formats) = match i % 4 {
            0 => (3, &FORMATS[2..]),
            step => ([32, 160, 576][step - 1], &FORMATS[..]),
        };
        let (gate, up) = (formats[i % formats.len()], formats[(i + i / 5 % 2) % formats.len()]);
        let (x_dtype, other) = (DTYPES[i / 2 % 2], DTYPES[i % 2]);
        let parts = [gate, up].map(|format| packed(format, half, len, noise));
        Self {
            front: [Front::Nothing, Front::Norm, Front::ResidualAndNorm][i / 3 % 3],
            x: Buffer::noise(x_dtype, rows, len, 3, noise),
            residual: Buffer::noise(x_dtype, rows, len, 2, noise),
            norm_weight: Buffer::noise(other, 1, len, 0, noise),
            weight: Weight::new(parts.into()).unwrap(),
            bias: (!i.is_multiple_of(4))
                .then(|| Buffer::noise(DTYPES[i / 4 % 2], 1, 2 * half, 0, noise)),
            out_dtype: DTYPES[i / 3 % 2],
        }
    }

    fn norm<'a>(&'a self, residual: &'a mut Buffer, normed: &'a mut Buffer) -> Norm<'a> {
        let has_residual = self.front == Front::ResidualAndNorm;
        Norm {
            x: self.x.view(),
            residual: has_residual.then(|| residual.view_mut()),
            weight: self.norm_weight.view(),
            eps: 1e-5,
            out: normed.view_mut(),
        }
    }

    /// The result, gated or not, and what is left in the residual stream and the norm's output.
    fn run(&self, pool: &Pool, is_gated: bool, is_fused: bool) -> [Buffer; 3] {
        let (rows, cols) = (self.x.rows(), self.weight.num_rows());
        let poisoned = |dtype, cols| Buffer::poisoned(dtype, rows, cols, 5);
        let mut normed = poisoned(self.x.dtype(), self.x.cols());
        let mut out = poisoned(self.out_dtype, if is_gated { cols / 2 } else { cols });
        let (before, mut residual) = (out.clone(), self.residual.clone());
        let (weight, bias) = (&self.weight, self.bias.as_ref().map(Buffer::view));
        let product = |x: Matrix<'_>, out: &mut Buffer| {
            let mut both = poisoned(self.out_dtype, cols);
            if is_gated && is_fused {
                linear_silu_mul(pool, &x, weight, bias.as_ref(), &mut out.view_mut()).unwrap();
            } else if is_gated {
                linear(pool, &x, weight, bias.as_ref(), &mut both.view_mut()).unwrap();
                silu_mul(pool, &both.view(), &mut out.view_mut()).unwrap();
            } else {
                linear(pool, &x, weight, bias.as_ref(), &mut out.view_mut()).unwrap();
            }
        };
        match (self.front, is_fused, is_gated) {
            (Front::Nothing, ..) => product(self.x.view(), &mut out),
            (_, false, _) => {
                rms_norm(pool, &self.norm(&mut residual, &mut normed)).unwrap();
                product(normed.view(), &mut out);
            }
            (_, true, false) => {
                let norm = self.norm(&mut residual, &mut normed);
                linear(pool, norm, weight, bias.as_ref(), &mut out.view_mut()).unwrap();
            }
            (_, true, true) => {
                let norm = self.norm(&mut residual, &mut normed);
                linear_silu_mul(pool, norm, weight, bias.as_ref(), &mut out.view_mut()).unwrap();
            }
        }
        out.assert_guards(&before);
        residual.assert_guards(&self.residual);
        normed.assert_guards(&poisoned(self.x.dtype(), self.x.cols()));
        [out, residual, normed]
    }
}

#[test]
fn the_bits_of_one_after_the_other() {
    let mut noise = Noise::new(17);
    let pools = pools();
    for (i, (rows, half)) in
        ROWS.into_iter().flat_map(|rows| HALVES.map(|half| (rows, half))).enumerate()
    {
        for turn in 0..5 {
            let case = Case::new(i + 7 * turn, rows, half, &mut noise);
            let pool = &pools[(i + turn) % pools.len()];
            for is_gated in [false, true] {
                let got = case.run(pool, is_gated, true);
                let want = case.run(pool, is_gated, false);
                for (name, (got, want)) in
                    ["out", "residual", "normed"].iter().zip(got.iter().zip(&want))
                {
                    for row in 0..rows {
                        assert_eq!(
                            got.row_bits(row),
                            want.row_bits(row),
                            "{name} of row {row} of {rows} by {half}, {:?}, {pool:?}, {:?}, gated: {is_gated}",
                            case.front,
                            case.weight
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused_by_name() {
    let (pool, noise) = (&pools()[0], &mut Noise::new(3));
    let mut weight = |rows: &[usize]| {
        let parts = rows.iter().map(|&rows| packed(WeightFormat::F32, rows, 4, noise));
        Weight::new(parts.collect()).unwrap()
    };
    let x = [0.0; 8];
    let gated = |weight: &Weight, cols: usize| {
        let mut out = vec![0.0; 2 * cols];
        let out = &mut MatrixMut::f32(&mut out, cols);
        linear_silu_mul(pool, &Matrix::f32(&x, 4), weight, None, out).map_err(|e| e.to_string())
    };
    // One part of 128 rows is two halves of a strip; one of 48 is not.
    for rows in [&[24, 24][..], &[64, 8, 64, 8], &[128], &[64, 64]] {
        let weight = weight(rows);
        let cols = weight.num_rows() / 2;
        assert_eq!(gated(&weight, cols), Ok(()), "{rows:?}");
        let error = gated(&weight, cols + 1).unwrap_err();
        assert_eq!(error, format!("out: got [2, {}] float32, want [2, {cols}]", cols + 1));
    }
    for rows in [
        &[48][..],
        &[24, 25],
        &[24, 26],
        &[8, 24],
        &[10, 150],
        &[8, 64, 64, 8],
        &[64],
        &[16, 16, 32],
    ] {
        let error = gated(&weight(rows), 24).unwrap_err();
        let rows: Vec<_> = rows.iter().map(ToString::to_string).collect();
        let want = format!("parts of {} rows, want two halves of equal parts", rows.join(", "));
        assert_eq!(error, format!("weight: got {want}"));
    }
    let mut normed = [0.0; 8];
    let norm = Norm {
        x: Matrix::f32(&x, 4),
        residual: None,
        weight: Matrix::f32(&x[..2], 2),
        eps: 0.0,
        out: MatrixMut::f32(&mut normed, 4),
    };
    let mut out = [0.0; 16];
    let error = linear(pool, norm, &weight(&[8]), None, &mut MatrixMut::f32(&mut out, 8));
    assert_eq!(error.unwrap_err().to_string(), "weight: got [1, 2] float32, want [4]");
}
