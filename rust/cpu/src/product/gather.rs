//! Rows of a weight as they are: an embedding that may be the matrix of the last product too.

use super::weight::{Weight, WeightFormat};
use super::{int8, many};
use crate::element::{Bf16, DType, Element};
use crate::error::{ArgumentError, require};
use crate::pool::Pool;
use crate::simd::{Kernel, LANES, Simd};
use crate::view::MatrixMut;

/// `out[i] = weight[rows[i]]`, rounded to the type of `out`.
///
/// # Errors
///
/// A row that the weight does not have, or an `out` of another shape; nothing is written.
pub fn gather(
    pool: &Pool,
    weight: &Weight,
    rows: &[i32],
    out: &mut MatrixMut<'_>,
) -> Result<(), ArgumentError> {
    let o = out.as_matrix();
    require(
        o.num_rows() == rows.len() && o.num_cols() == weight.num_cols(),
        "out",
        || o.describe(),
        || format!("[{}, {}]", rows.len(), weight.num_cols()),
    )?;
    let num_rows = weight.num_rows();
    let wrong = rows.iter().find(|&&row| usize::try_from(row).map_or(true, |row| row >= num_rows));
    if let Some(row) = wrong {
        return Err(ArgumentError::new("rows", row.to_string(), format!("0 to {}", num_rows - 1)));
    }
    let work_ns = rows.len() * weight.num_cols() * 4;
    pool.run(&Gather { weight, rows, out }, rows.len(), work_ns);
    Ok(())
}

struct Gather<'a> {
    weight: &'a Weight,
    rows: &'a [i32],
    out: &'a MatrixMut<'a>,
}

impl Kernel for Gather<'_> {
    #[inline(always)]
    fn run<S: Simd>(&self, s: S, item: usize) {
        let mut row = self.rows[item] as usize;
        let mut parts = self.weight.parts();
        while row >= parts[0].num_rows() {
            row -= parts[0].num_rows();
            parts = &parts[1..];
        }
        if parts[0].format() == WeightFormat::I8 {
            // SAFETY: `num_cols` elements of this item's row.
            int8::each_number(&parts[0], row, |k, number| unsafe { self.put(item, k, number) });
            return;
        }
        let (panel, lane) = (row / LANES, row % LANES);
        many::each_piece(s, &parts[0], panel, |start, numbers| {
            for (k, numbers) in (start..).zip(numbers) {
                // SAFETY: one of `num_cols` elements of this item's row.
                unsafe { self.put(item, k, numbers[lane]) };
            }
        });
    }
}

impl Gather<'_> {
    /// Write element `k` of a row of `out`.
    ///
    /// # Safety
    ///
    /// There is one, and no other thread has this row.
    #[inline(always)]
    unsafe fn put(&self, item: usize, k: usize, number: f32) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.out.as_matrix().dtype() {
                DType::F32 => self.out.row::<f32>(item).add(k).write(number),
                DType::Bf16 => self.out.row::<Bf16>(item).add(k).write(Bf16::narrow(number)),
            }
        }
    }
}
