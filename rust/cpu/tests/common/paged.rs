//! Rows of attention over a shuffled pool of blocks, and what they should come to.

use std::ops::Range;

use fastserve_cpu::{
    Attention, DType, KvDType, KvLayout, Matrix, Pool, Rope, paged_attention, rope_and_write_kv,
};

use super::cache::{Cache, as_stored, quantized};
use super::{Buffer, Noise};

/// Shape of a call.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    /// (query tokens, tokens with K and V) of each row.
    pub(crate) rows: Vec<(usize, usize)>,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) block_size: usize,
    pub(crate) dtype: DType,
    pub(crate) kv_dtype: KvDType,
    pub(crate) window: usize,
    pub(crate) softcap: f32,
    /// Leading blocks that every row but the first has in common with row 0, content included; as
    /// many as it has before its queries.
    pub(crate) num_shared_blocks: usize,
}

impl Case {
    /// What keys and values are before they are stored.
    fn given_dtype(&self) -> DType {
        if self.kv_dtype == KvDType::Bf16 { DType::Bf16 } else { DType::F32 }
    }

    /// Leading blocks that a row has in common with row 0.
    fn shared(&self, row: usize) -> usize {
        let cached =
            |row: usize| (self.rows[row].1.saturating_sub(self.rows[row].0)) / self.block_size;
        if row == 0 { 0 } else { self.num_shared_blocks.min(cached(row)).min(cached(0)) }
    }
}

impl Default for Case {
    fn default() -> Self {
        Self {
            rows: vec![(1, 1)],
            num_heads: 1,
            num_kv_heads: 1,
            head_dim: 64,
            block_size: 16,
            dtype: DType::F32,
            kv_dtype: KvDType::F32,
            window: 0,
            softcap: 0.0,
            num_shared_blocks: 0,
        }
    }
}

/// Keys or values of a row.
struct Tokens {
    /// What is given to be stored; bfloat16 where it is stored as that.
    given: Buffer,
    /// What is in the cache.
    stored: Vec<Vec<f64>>,
}

impl Tokens {
    fn new(given: Buffer, layout: KvLayout) -> Self {
        let stored = |token| {
            let head = |head| as_stored(layout.dtype, &head_of(&given, token, head, layout));
            (0..layout.num_kv_heads).flat_map(head).collect()
        };
        let stored = (0..given.rows()).map(stored).collect();
        Self { given, stored }
    }

    /// Column `col` of token `token`: as stored, or as given.
    fn get(&self, is_stored: bool, token: usize, col: usize) -> f64 {
        if is_stored { self.stored[token][col] } else { f64::from(self.given.get(token, col)) }
    }
}

/// One head of one token.
fn head_of(tokens: &Buffer, token: usize, head: usize, layout: KvLayout) -> Vec<f32> {
    (0..layout.head_dim).map(|dim| tokens.get(token, head * layout.head_dim + dim)).collect()
}

/// A filled pool with the arguments of a call.
pub(crate) struct Call {
    pub(crate) case: Case,
    pub(crate) q: Buffer,
    /// K and V of each row.
    k: Vec<Tokens>,
    v: Vec<Tokens>,
    cache: Cache,
    block_tables: Vec<i32>,
    max_blocks: usize,
}

/// Block ids that must never be followed.
const NO_BLOCK: i32 = i32::MAX;

impl Call {
    /// K and V of row i depend on `seed`, i and the position alone, q also on the token's place in
    /// the row's sequence: so the same token can be asked for in different company.
    pub(crate) fn new(case: &Case, seed: u64) -> Self {
        let mut noise = Noise::new(seed + 1_000_000);
        let blocks = |&(_, len): &(usize, usize)| len.div_ceil(case.block_size);
        let num_blocks = case.rows.iter().map(blocks).sum::<usize>() + 3;
        let layout = KvLayout {
            num_blocks,
            num_kv_heads: case.num_kv_heads,
            block_size: case.block_size,
            head_dim: case.head_dim,
            dtype: case.kv_dtype,
        };
        let mut free: Vec<i32> = (0..num_blocks as i32).collect();
        for i in (1..num_blocks).rev() {
            free.swap(i, noise.below(i + 1));
        }
        // The last row of the table is wider than any sequence, as a persistent table is.
        let max_blocks = case.rows.iter().map(blocks).max().unwrap_or(0) + 2;
        let mut block_tables = vec![NO_BLOCK; case.rows.len() * max_blocks];
        for (row, shape) in case.rows.iter().enumerate() {
            // Blocks that the window has passed may be gone.
            let first = if case.window == 0 {
                0
            } else {
                (shape.1 + 1).saturating_sub(shape.0 + case.window)
            };
            for index in 0..blocks(shape) {
                let block = free.pop().expect("enough blocks");
                let gone = (index + 1) * case.block_size <= first;
                block_tables[row * max_blocks + index] = if gone {
                    NO_BLOCK
                } else if index < case.shared(row) && block_tables[index] != NO_BLOCK {
                    block_tables[index]
                } else {
                    block
                };
            }
        }
        let cols = case.num_kv_heads * case.head_dim;
        let fill = |to: &mut Buffer, to_row: usize, row: usize, which: u64, position: usize| {
            let is_shared = which < 2 && position / case.block_size < case.shared(row);
            let row = if is_shared { 0 } else { row };
            let place = (row as u64 * 3 + which) * 1_000_003 + position as u64;
            let mut noise = Noise::new(seed * 1_000_000_007 + place);
            (0..to.cols()).for_each(|col| to.set(to_row, col, noise.next() * 2.0));
        };
        let filled = |which| -> Vec<Tokens> {
            let one = |(row, &(_, len)): (usize, &(usize, usize))| {
                let mut buffer = Buffer::poisoned(case.given_dtype(), len, cols, 0);
                (0..len).for_each(|position| fill(&mut buffer, position, row, which, position));
                Tokens::new(buffer, layout)
            };
            case.rows.iter().enumerate().map(one).collect()
        };
        let num_tokens = case.rows.iter().map(|&(tokens, _)| tokens).sum();
        let mut q = Buffer::poisoned(case.dtype, num_tokens, case.num_heads * case.head_dim, 5);
        let mut token = 0;
        for (row, &(tokens, len)) in case.rows.iter().enumerate() {
            for i in 0..tokens {
                fill(&mut q, token, row, 2, (len + i).saturating_sub(tokens));
                token += 1;
            }
        }
        let (k, v, cache) = (filled(0), filled(1), Cache::poisoned(layout));
        let mut this = Self { case: case.clone(), q, k, v, cache, block_tables, max_blocks };
        this.write();
        this
    }

    /// Store K and V through the layout; what nobody owns stays NaN.
    fn write(&mut self) {
        let layout = self.cache.layout;
        for (row, (k, v)) in self.k.iter().zip(&self.v).enumerate() {
            for position in 0..k.given.rows() {
                let Some(slot) = self.slot(row, position) else { continue };
                for head in 0..layout.num_kv_heads {
                    let [k, v] = [k, v].map(|x| head_of(&x.given, position, head, layout));
                    self.cache.write(slot, head, &k, &v);
                }
            }
        }
    }

    /// Where a token of a row is stored, if its block is still there.
    fn slot(&self, row: usize, position: usize) -> Option<usize> {
        let block_size = self.cache.layout.block_size;
        let block = self.block_tables[row * self.max_blocks + position / block_size];
        (block != NO_BLOCK).then(|| block as usize * block_size + position % block_size)
    }

    fn scale(&self) -> f32 {
        (self.case.head_dim as f32).powf(-0.5) * 1.5
    }

    /// The output, with guards checked.
    pub(crate) fn run(&self, pool: &Pool) -> Buffer {
        self.run_told(pool, true)
    }

    /// The output; the call may be told which blocks rows share, or not.
    pub(crate) fn run_told(&self, pool: &Pool, is_told: bool) -> Buffer {
        let rows = &self.case.rows;
        let mut query_indptr = vec![0];
        for &(tokens, _) in rows {
            query_indptr.push(query_indptr.last().unwrap() + tokens as i32);
        }
        let row_slots: Vec<i32> = (0..rows.len() as i32).collect();
        let seq_lens: Vec<i32> = rows.iter().map(|&(_, len)| len as i32).collect();
        // With the row before: both have the blocks of row 0, but for those that a window has passed.
        let table = |row: usize| &self.block_tables[row * self.max_blocks..];
        let with_row_before = |row: usize| {
            let most = match row {
                0 => 0,
                1 => self.case.shared(1),
                _ => self.case.shared(row).min(self.case.shared(row - 1)),
            };
            (0..most).take_while(|&index| table(row)[index] == table(row - 1)[index]).count()
        };
        let num_shared_blocks: Vec<i32> =
            (0..rows.len()).map(|row| with_row_before(row) as i32).collect();
        let args = Attention {
            q: self.q.view(),
            kv: self.cache.view(),
            block_tables: &self.block_tables,
            max_blocks: self.max_blocks,
            row_slots: &row_slots,
            query_indptr: &query_indptr,
            seq_lens: &seq_lens,
            num_shared_blocks: if is_told { &num_shared_blocks } else { &[] },
            scale: self.scale(),
            window: self.case.window,
            softcap: self.case.softcap,
        };
        let poisoned = Buffer::poisoned(self.case.dtype, self.q.rows(), self.q.cols(), 3);
        let mut out = poisoned.clone();
        paged_attention(pool, &args, &mut out.view_mut()).unwrap();
        out.assert_guards(&poisoned);
        out
    }

    /// What it should come to, in `f64`.
    pub(crate) fn reference(&self) -> Vec<Vec<f64>> {
        self.all_heads(|call, place| call.head(place, true))
    }

    /// What it should come to if K and V were stored as they are given.
    pub(crate) fn reference_of_given(&self) -> Vec<Vec<f64>> {
        self.all_heads(|call, place| call.head(place, false))
    }

    /// How far the two may be from each other with int8: see [`Call::head_bound`].
    pub(crate) fn bounds_of_int8(&self) -> Vec<Vec<f64>> {
        self.all_heads(|call, place| vec![call.head_bound(place); call.case.head_dim])
    }

    fn all_heads(&self, one: impl Fn(&Self, &HeadPlace) -> Vec<f64>) -> Vec<Vec<f64>> {
        let mut out = Vec::new();
        for (row, &(tokens, len)) in self.case.rows.iter().enumerate() {
            for token in 0..tokens {
                if len == 0 {
                    out.push(vec![0.0; self.q.cols()]);
                    continue;
                }
                let high = len - tokens + token + 1;
                let window = if self.case.window == 0 { high } else { self.case.window };
                let keys = high.saturating_sub(window)..high;
                let place = |head| HeadPlace { row, token: out.len(), head, keys: keys.clone() };
                let heads = 0..self.case.num_heads;
                let heads: Vec<f64> = heads.flat_map(|head| one(self, &place(head))).collect();
                out.push(heads);
            }
        }
        out
    }

    /// First column of a head's keys and values.
    fn kv_col(&self, head: usize) -> usize {
        head / (self.case.num_heads / self.case.num_kv_heads) * self.case.head_dim
    }

    fn head(&self, place: &HeadPlace, is_stored: bool) -> Vec<f64> {
        let &HeadPlace { row, token, head, ref keys } = place;
        let (dim, kv_col) = (self.case.head_dim, self.kv_col(head));
        let softcap = f64::from(self.case.softcap);
        let logit = |key: usize| {
            let product = |i| {
                let k = self.k[row].get(is_stored, key, kv_col + i);
                f64::from(self.q.get(token, head * dim + i)) * k
            };
            let logit = (0..dim).map(product).sum::<f64>() * f64::from(self.scale());
            if softcap == 0.0 { logit } else { softcap * (logit / softcap).tanh() }
        };
        let logits: Vec<f64> = keys.clone().map(logit).collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = logits.iter().map(|x| (x - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let value = |i| {
            let values = keys.clone().map(|key| self.v[row].get(is_stored, key, kv_col + i));
            values.zip(&weights).map(|(v, w)| v * w).sum::<f64>() / sum
        };
        (0..dim).map(value).collect()
    }

    /// How far int8 may move an output. A value moves by half of its scale. A logit moves by the sum of
    /// `head_dim` errors, even in ± half of the key's scale and independent: six standard deviations
    /// δ. Weights then change by factors within e^±2δ.
    fn head_bound(&self, place: &HeadPlace) -> f64 {
        let &HeadPlace { row, token, head, ref keys } = place;
        let (dim, kv_head) = (self.case.head_dim, self.kv_col(head) / self.case.head_dim);
        let scale = |tokens: &Tokens| {
            let one = |key| quantized(&head_of(&tokens.given, key, kv_head, self.cache.layout)).0;
            keys.clone().map(|key| f64::from(one(key))).fold(0.0, f64::max)
        };
        let (k_scale, v_scale) = (scale(&self.k[row]), scale(&self.v[row]));
        let square = |i| f64::from(self.q.get(token, head * dim + i)).powi(2);
        let q_norm = (0..dim).map(square).sum::<f64>().sqrt();
        let delta = 6.0 * f64::from(self.scale()) * q_norm * k_scale / 12_f64.sqrt();
        v_scale / 2.0 + ((2.0 * delta).exp() - 1.0) * 127.0 * v_scale
    }

    /// The cache's bits as `rope_and_write_kv` fills it with an angle of zero, to compare with `write`.
    pub(crate) fn written_by_the_kernel(&self, pool: &Pool) -> Vec<u32> {
        let layout = self.cache.layout;
        let mut cache = Cache::poisoned(layout);
        for (row, (k, v)) in self.k.iter().zip(&self.v).enumerate() {
            let num_tokens = k.given.rows();
            let positions: Vec<i32> = (0..num_tokens as i32).collect();
            let slot = |position| self.slot(row, position).map_or(-1, |slot| slot as i32);
            let slot_mapping: Vec<i32> = (0..num_tokens).map(slot).collect();
            let angles: Vec<f32> = positions.iter().flat_map(|_| [1.0, 0.0]).collect();
            let rope = Rope {
                k: k.given.view(),
                v: v.given.view(),
                positions: &positions,
                slot_mapping: &slot_mapping,
                cos_sin: Matrix::f32(&angles, 2),
                q_norm: None,
                k_norm: None,
                norm_eps: 0.0,
            };
            let given = self.case.given_dtype();
            let mut q = Buffer::noise(given, num_tokens, layout.head_dim, 0, &mut Noise::new(1));
            rope_and_write_kv(pool, &mut q.view_mut(), &mut cache.view_mut(), &rope).unwrap();
        }
        cache.bits().to_vec()
    }

    /// The cache's bits.
    pub(crate) fn cache_bits(&self) -> &[u32] {
        self.cache.bits()
    }
}

/// One query head of one token: its row, the token of the call, and the keys that it sees.
struct HeadPlace {
    row: usize,
    token: usize,
    head: usize,
    keys: Range<usize>,
}
