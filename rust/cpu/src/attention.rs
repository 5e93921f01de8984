//! Attention of any mix of rows over paged KV.

use crate::element::{Bf16, DType, Element};
use crate::error::{ArgumentError, require};
use crate::norm::{get, set};
use crate::pool::Pool;
use crate::view::{KvView, Matrix, MatrixMut};

/// Everything of [`paged_attention`] that is only read.
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// Queries `[tokens, heads * head_dim]`.
    pub q: Matrix<'a>,
    /// The layer's keys and values.
    pub kv: KvView<'a>,
    /// `[slots, max_blocks]`: block ids of each row slot, in order.
    pub block_tables: &'a [i32],
    /// Columns of `block_tables`.
    pub max_blocks: usize,
    /// Which block table each row uses.
    pub row_slots: &'a [i32],
    /// Row i owns tokens `query_indptr[i]..query_indptr[i + 1]` of q.
    pub query_indptr: &'a [i32],
    /// Tokens of each row that have K and V: its last query token is at `seq_lens[i] - 1`.
    pub seq_lens: &'a [i32],
    /// Factor of the logits.
    pub scale: f32,
    /// Keys that a token sees, itself included; 0: all.
    pub window: usize,
    /// Logits become `softcap * tanh(logit / softcap)`; 0: they stay.
    pub softcap: f32,
}

/// Causal attention, `out = softmax(scale * q k^T) v`, for every row.
pub fn paged_attention(
    _pool: &Pool,
    args: &Attention<'_>,
    out: &mut MatrixMut<'_>,
) -> Result<(), ArgumentError> {
    check(args, out.as_matrix())?;
    let layout = *args.kv.layout();
    let dim = layout.head_dim;
    let num_heads = args.q.num_cols() / dim;
    let group = num_heads / layout.num_kv_heads;
    for row in 0..args.row_slots.len() {
        let (from, to) = (args.query_indptr[row] as usize, args.query_indptr[row + 1] as usize);
        let seq_len = args.seq_lens[row] as usize;
        let table = &args.block_tables[args.row_slots[row] as usize * args.max_blocks..];
        for token in from..to {
            if seq_len == 0 {
                (0..num_heads * dim).for_each(|i| set(out, token, i, 0.0));
                continue;
            }
            let high = seq_len - (to - token) + 1;
            let low = if args.window == 0 { 0 } else { high.saturating_sub(args.window) };
            for head in 0..num_heads {
                let at = |key: usize, dim: usize, tile: usize, place: PlaceOf| {
                    let block = table[key / layout.block_size] as usize;
                    let place = place(&layout, args.kv.dtype(), key % layout.block_size, dim);
                    let base = layout.key_tile(block, head / group) + tile * layout.tile_len();
                    load(&args.kv, base + place)
                };
                let mut p: Vec<f32> = (low..high)
                    .map(|key| {
                        let dot = |i| {
                            get(&args.q, token, head * dim + i)
                                * at(key, i, 0, crate::layout::KvLayout::key_at)
                        };
                        let logit = (0..dim).map(dot).sum::<f32>() * args.scale;
                        if args.softcap == 0.0 {
                            logit
                        } else {
                            args.softcap * (logit / args.softcap).tanh()
                        }
                    })
                    .collect();
                let max = p.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                p.iter_mut().for_each(|x| *x = (*x - max).exp());
                let sum: f32 = p.iter().sum();
                for i in 0..dim {
                    let value = |(j, w): (usize, &f32)| {
                        w * at(low + j, i, 1, crate::layout::KvLayout::value_at)
                    };
                    let total: f32 = p.iter().enumerate().map(value).sum();
                    set(out, token, head * dim + i, total / sum);
                }
            }
        }
    }
    Ok(())
}

type PlaceOf = fn(&crate::layout::KvLayout, DType, usize, usize) -> usize;

fn load(kv: &KvView<'_>, at: usize) -> f32 {
    assert!(at < kv.layout().layer_len());
    // SAFETY: inside the layer.
    unsafe {
        match kv.dtype() {
            DType::F32 => *kv.base::<f32>().add(at),
            DType::Bf16 => (*kv.base::<Bf16>().add(at)).widen(),
        }
    }
}

fn check(args: &Attention<'_>, out: &Matrix<'_>) -> Result<(), ArgumentError> {
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
    Ok(())
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
