//! What a call must satisfy before anything is computed: O(rows + blocks used).

use super::Attention;
use crate::error::{ArgumentError, require};
use crate::view::Matrix;

pub(super) fn check(args: &Attention<'_>, out: &Matrix<'_>) -> Result<(), ArgumentError> {
    let Attention { q, kv, .. } = args;
    let layout = kv.layout();
    layout.check()?;
    let (dim, kv_heads) = (layout.head_dim, layout.num_kv_heads);
    require(
        kv_heads > 0 && q.num_cols() > 0 && q.num_cols().is_multiple_of(dim * kv_heads),
        "q",
        || q.describe(),
        || format!("[tokens, a multiple of {kv_heads} kv heads * {dim}]"),
    )?;
    require(
        (out.dtype(), out.num_rows(), out.num_cols()) == (q.dtype(), q.num_rows(), q.num_cols()),
        "out",
        || out.describe(),
        || q.describe(),
    )?;
    require(
        args.scale.is_finite(),
        "scale",
        || args.scale.to_string(),
        || "a finite number".into(),
    )?;
    require(
        args.softcap >= 0.0 && args.softcap.is_finite(),
        "softcap",
        || args.softcap.to_string(),
        || "0 (off) or a positive number".into(),
    )?;
    check_rows(args)
}

fn check_rows(args: &Attention<'_>) -> Result<(), ArgumentError> {
    let rows = args.row_slots.len();
    let indptr = args.query_indptr;
    let starts_and_ends = indptr.len() == rows + 1
        && indptr[0] == 0
        && indptr[rows] as usize == args.q.num_rows()
        && indptr.is_sorted();
    require(
        starts_and_ends,
        "query_indptr",
        || {
            let (first, last) = (indptr.first(), indptr.last());
            format!("{} words from {first:?} to {last:?}", indptr.len())
        },
        || format!("{} ascending words from 0 to {}", rows + 1, args.q.num_rows()),
    )?;
    require(
        args.seq_lens.len() == rows,
        "seq_lens",
        || format!("{} words", args.seq_lens.len()),
        || format!("one per row, {rows}"),
    )?;
    let num_slots = args.block_tables.len().checked_div(args.max_blocks).unwrap_or(0);
    for row in 0..rows {
        let slot = args.row_slots[row];
        require(
            (0..num_slots as i64).contains(&i64::from(slot)),
            "row_slots",
            || format!("{slot} at {row}"),
            || format!("0 to {num_slots} (rows of block_tables) exclusive"),
        )?;
        check_row(args, row, slot as usize)?;
    }
    if args.num_shared_blocks.is_empty() {
        return Ok(());
    }
    require(
        args.num_shared_blocks.len() == rows,
        "num_shared_blocks",
        || format!("{} words", args.num_shared_blocks.len()),
        || format!("one per row, {rows}, or none"),
    )?;
    (0..rows).try_for_each(|row| check_shared(args, row))
}

/// The leading blocks that a row shares with the one before are the same, and before all queries.
fn check_shared(args: &Attention<'_>, row: usize) -> Result<(), ArgumentError> {
    let shared = args.num_shared_blocks[row];
    if shared == 0 {
        return Ok(());
    }
    let cached = |row: usize| {
        let tokens = args.query_indptr[row + 1] - args.query_indptr[row];
        (args.seq_lens[row] - tokens).max(0) as usize / args.kv.layout().block_size
    };
    let most = if row == 0 { 0 } else { cached(row).min(cached(row - 1)) };
    let num = usize::try_from(shared).unwrap_or(usize::MAX);
    require(
        num <= most,
        "num_shared_blocks",
        || format!("{shared} at {row}"),
        || format!("0 to {most}, blocks before the queries of this row and the one before"),
    )?;
    let table = |row: usize| {
        let slot = args.row_slots[row] as usize;
        &args.block_tables[slot * args.max_blocks..][..num]
    };
    require(
        table(row) == table(row - 1),
        "num_shared_blocks",
        || format!("{shared} at {row}"),
        || "leading blocks that are those of the row before".into(),
    )
}

fn check_row(args: &Attention<'_>, row: usize, slot: usize) -> Result<(), ArgumentError> {
    let layout = args.kv.layout();
    let block_size = layout.block_size;
    let tokens = i64::from(args.query_indptr[row + 1] - args.query_indptr[row]);
    let seq_len = i64::from(args.seq_lens[row]);
    let most = (args.max_blocks * block_size) as i64;
    require(
        seq_len == 0 || (seq_len >= tokens && seq_len > 0 && seq_len <= most),
        "seq_lens",
        || format!("{seq_len} at {row}, which has {tokens} query tokens"),
        || format!("0, or {tokens} to {most} (what block_tables can hold)"),
    )?;
    if seq_len == 0 || tokens == 0 {
        return Ok(());
    }
    let first_high = (seq_len - tokens + 1) as usize;
    let low = if args.window == 0 { 0 } else { first_high.saturating_sub(args.window) };
    let used = low / block_size..(seq_len as usize).div_ceil(block_size);
    for index in used {
        let block = args.block_tables[slot * args.max_blocks + index];
        require(
            (0..layout.num_blocks as i64).contains(&i64::from(block)),
            "block_tables",
            || format!("block {block} at [{slot}, {index}]"),
            || format!("0 to {} (blocks of the pool) exclusive", layout.num_blocks),
        )?;
    }
    Ok(())
}
