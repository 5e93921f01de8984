//! Rows of attention over a shuffled pool of blocks, and what they should come to.

use fastserve_cpu::{
    Attention, Bf16, DType, KvLayout, KvView, KvViewMut, Matrix, Pool, Rope, paged_attention,
    rope_and_write_kv,
};

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
    pub(crate) kv_dtype: DType,
    pub(crate) window: usize,
    pub(crate) softcap: f32,
    /// Leading blocks that every row but the first has in common with row 0, content included; as
    /// many as it has before its queries.
    pub(crate) num_shared_blocks: usize,
}

impl Case {
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
            kv_dtype: DType::F32,
            window: 0,
            softcap: 0.0,
            num_shared_blocks: 0,
        }
    }
}

/// A filled pool with the arguments of a call.
pub(crate) struct Call {
    pub(crate) case: Case,
    pub(crate) q: Buffer,
    /// K and V of each row, rounded to the type of the cache.
    k: Vec<Buffer>,
    v: Vec<Buffer>,
    wide: Vec<f32>,
    narrow: Vec<Bf16>,
    layout: KvLayout,
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
        let filled = |which| -> Vec<Buffer> {
            let one = |(row, &(_, len)): (usize, &(usize, usize))| {
                let mut buffer = Buffer::poisoned(case.kv_dtype, len, cols, 0);
                (0..len).for_each(|position| fill(&mut buffer, position, row, which, position));
                buffer
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
        let len = layout.layer_len();
        let (wide, narrow) = match case.kv_dtype {
            DType::F32 => (vec![f32::NAN; len], Vec::new()),
            DType::Bf16 => (Vec::new(), vec![Bf16::from_f32(f32::NAN); len]),
        };
        let (k, v) = (filled(0), filled(1));
        let mut this =
            Self { case: case.clone(), q, k, v, wide, narrow, layout, block_tables, max_blocks };
        this.write();
        this
    }

    /// Store K and V through the layout; what nobody owns stays NaN.
    fn write(&mut self) {
        let layout = self.layout;
        for row in 0..self.case.rows.len() {
            for position in 0..self.case.rows[row].1 {
                let (index, offset) = (position / layout.block_size, position % layout.block_size);
                let block = self.block_tables[row * self.max_blocks + index];
                if block == NO_BLOCK {
                    continue;
                }
                for col in 0..self.k[row].cols() {
                    let (head, dim) = (col / layout.head_dim, col % layout.head_dim);
                    let dtype = self.case.kv_dtype;
                    let k_at =
                        layout.key_tile(block as usize, head) + layout.key_at(dtype, offset, dim);
                    let v_at = layout.value_tile(block as usize, head)
                        + layout.value_at(dtype, offset, dim);
                    let (k, v) = (self.k[row].get(position, col), self.v[row].get(position, col));
                    match dtype {
                        DType::F32 => (self.wide[k_at], self.wide[v_at]) = (k, v),
                        DType::Bf16 => {
                            (self.narrow[k_at], self.narrow[v_at]) =
                                (Bf16::from_f32(k), Bf16::from_f32(v));
                        }
                    }
                }
            }
        }
    }

    fn kv(&self) -> KvView<'_> {
        match self.case.kv_dtype {
            DType::F32 => KvView::new(&self.wide, self.layout),
            DType::Bf16 => KvView::new(&self.narrow, self.layout),
        }
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
            kv: self.kv(),
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
                let heads = 0..self.case.num_heads;
                let at = out.len();
                out.push(heads.flat_map(|head| self.head(row, at, head, keys.clone())).collect());
            }
        }
        out
    }

    fn head(
        &self,
        row: usize,
        token: usize,
        head: usize,
        keys: std::ops::Range<usize>,
    ) -> Vec<f64> {
        let dim = self.case.head_dim;
        let kv_col = head / (self.case.num_heads / self.case.num_kv_heads) * dim;
        let softcap = f64::from(self.case.softcap);
        let logit = |key: usize| {
            let product = |i| {
                f64::from(self.q.get(token, head * dim + i))
                    * f64::from(self.k[row].get(key, kv_col + i))
            };
            let logit = (0..dim).map(product).sum::<f64>() * f64::from(self.scale());
            if softcap == 0.0 { logit } else { softcap * (logit / softcap).tanh() }
        };
        let logits: Vec<f64> = keys.clone().map(logit).collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = logits.iter().map(|x| (x - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let value = |i| {
            let values = keys.clone().map(|key| f64::from(self.v[row].get(key, kv_col + i)));
            values.zip(&weights).map(|(v, w)| v * w).sum::<f64>() / sum
        };
        (0..dim).map(value).collect()
    }

    /// The cache as `rope_and_write_kv` fills it with an angle of zero, to compare with `write`.
    pub(crate) fn written_by_the_kernel(&self, pool: &Pool) -> Vec<u32> {
        let mut wide = vec![f32::NAN; self.wide.len()];
        let mut narrow = vec![Bf16::from_f32(f32::NAN); self.narrow.len()];
        for (row, (k, v)) in self.k.iter().zip(&self.v).enumerate() {
            let positions: Vec<i32> = (0..k.rows() as i32).collect();
            let slot = |position: &i32| {
                let (index, offset) = (
                    *position as usize / self.layout.block_size,
                    *position as usize % self.layout.block_size,
                );
                let block = self.block_tables[row * self.max_blocks + index];
                if block == NO_BLOCK {
                    -1
                } else {
                    block * self.layout.block_size as i32 + offset as i32
                }
            };
            let slot_mapping: Vec<i32> = positions.iter().map(slot).collect();
            let angles: Vec<f32> = positions.iter().flat_map(|_| [1.0, 0.0]).collect();
            let rope = Rope {
                k: k.view(),
                v: v.view(),
                positions: &positions,
                slot_mapping: &slot_mapping,
                cos_sin: Matrix::f32(&angles, 2),
                q_norm: None,
                k_norm: None,
                norm_eps: 0.0,
            };
            let mut q = Buffer::noise(
                self.case.kv_dtype,
                k.rows(),
                self.layout.head_dim,
                0,
                &mut Noise::new(1),
            );
            let mut kv = match self.case.kv_dtype {
                DType::F32 => KvViewMut::new(&mut wide, self.layout),
                DType::Bf16 => KvViewMut::new(&mut narrow, self.layout),
            };
            rope_and_write_kv(pool, &mut q.view_mut(), &mut kv, &rope).unwrap();
        }
        Self::bits(&wide, &narrow)
    }

    /// The cache's bits.
    pub(crate) fn cache_bits(&self) -> Vec<u32> {
        Self::bits(&self.wide, &self.narrow)
    }

    fn bits(wide: &[f32], narrow: &[Bf16]) -> Vec<u32> {
        let narrow = narrow.iter().map(|v| u32::from(v.0));
        wide.iter().map(|v| v.to_bits()).chain(narrow).collect()
    }
}
