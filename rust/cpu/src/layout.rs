//! Where a key or a value lies: the physical layout of a KV block, in this one place.
//!
//! All layers' KV is one C-contiguous array
//!
//! ```text
//! kv[num_layers, num_blocks, num_kv_heads, 2, tile]     2 = (K tile, V tile)
//! ```
//!
//! of `float32`, `bfloat16` or `int8`. Outside this crate a tile is opaque; a block is copied by
//! copying `kv[:, block]`. The last axis, written out (G = 8 if `block_size` is 8, otherwise 16):
//!
//! ```text
//!            K tile                                V tile
//! float32    [block_size / G][head_dim][G]         [block_size][head_dim]
//! bfloat16   [block_size / G][head_dim / 2][G][2]  [block_size / 2][head_dim][2]     [2] = (1, 0)
//! int8       [block_size / G][head_dim][G]         [block_size][head_dim]
//!            scale f32[block_size]                 scale f32[block_size]
//! ```
//!
//! Why. A score is a dot product over `head_dim`. With G keys side by side, one vector register
//! holds one dimension of G keys, so scores of G keys are accumulated with no horizontal sum. The
//! weighted sum of values runs over tokens, so there the dimensions lie side by side. `bfloat16`
//! comes in pairs along the axis of summation, the second first: widening is then one mask for the
//! first and one shift for the second of a pair, and instructions for pairs, which take the upper
//! half first, add them up in order (`simd::bf16`).
//! K and V of one (block, head) are neighbours, so that a block is one run of memory to stream.
//!
//! An `int8` tile is bytes: `block_size * head_dim` numbers (a multiple of 64), then the scales of
//! its tokens, so that they move with the block. A tile is a multiple of 32 bytes: scales are aligned
//! where the array is aligned to four. What numbers and scales mean is said in `store.rs`.

use crate::error::{ArgumentError, require};

/// Widest head: scratch rows have this many elements.
pub const MAX_HEAD_DIM: usize = 256;

/// Bytes of a scale.
const SCALE_BYTES: usize = size_of::<f32>();

/// What keys and values are stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvDType {
    /// IEEE binary32.
    F32,
    /// The upper half of a binary32, carried as `uint16`.
    Bf16,
    /// Signed bytes, and one `f32` scale for each token's key and for its value, of each head.
    I8,
}

impl KvDType {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::I8];

    /// Bytes of one element of the array.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::I8 => 1,
        }
    }

    /// Bytes that the array must be aligned to.
    pub const fn alignment(self) -> usize {
        match self {
            Self::F32 | Self::I8 => 4,
            Self::Bf16 => 2,
        }
    }

    /// The name that an option of the engine has for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::I8 => "int8",
        }
    }

    /// The type called `name`, if there is one.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Elements that a token takes in a tile of heads of `head_dim`, its scale included.
    pub const fn token_len(self, head_dim: usize) -> usize {
        match self {
            Self::F32 | Self::Bf16 => head_dim,
            Self::I8 => head_dim + SCALE_BYTES,
        }
    }
}

/// Shape of one layer's KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Heads of K and V.
    pub num_kv_heads: usize,
    /// Tokens in a block: 8, or a multiple of 16.
    pub block_size: usize,
    /// Elements of one head: a multiple of 8, at most [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// What they are stored as.
    pub dtype: KvDType,
}

/// Shape of the array that holds all layers' KV.
pub const fn kv_shape(num_layers: usize, layout: KvLayout) -> [usize; 5] {
    let [blocks, heads, two, tile] = kv_layer_shape(layout);
    [num_layers, blocks, heads, two, tile]
}

/// Shape of one layer's slice of it.
pub const fn kv_layer_shape(layout: KvLayout) -> [usize; 4] {
    [layout.num_blocks, layout.num_kv_heads, 2, layout.tile_len()]
}

impl KvLayout {
    /// Check that the block and head sizes are ones that the kernels know.
    ///
    /// # Errors
    ///
    /// Names the size, and what it may be.
    pub fn check(&self) -> Result<(), ArgumentError> {
        let Self { block_size, head_dim, .. } = *self;
        require(
            block_size == 8 || (block_size > 0 && block_size.is_multiple_of(16)),
            "block_size",
            || block_size.to_string(),
            || "8 or a multiple of 16".into(),
        )?;
        require(
            head_dim > 0 && head_dim.is_multiple_of(8) && head_dim <= MAX_HEAD_DIM,
            "head_dim",
            || head_dim.to_string(),
            || format!("a multiple of 8, at most {MAX_HEAD_DIM}"),
        )
    }

    /// Elements of one K or V tile: numbers, or bytes where they have scales.
    pub const fn tile_len(&self) -> usize {
        self.block_size * self.dtype.token_len(self.head_dim)
    }

    /// Elements of one layer.
    pub const fn layer_len(&self) -> usize {
        self.num_blocks * self.num_kv_heads * 2 * self.tile_len()
    }

    /// Offset of the K tile of (block, head) in a layer, in elements.
    #[inline(always)]
    pub const fn key_tile(&self, block: usize, head: usize) -> usize {
        (block * self.num_kv_heads + head) * 2 * self.tile_len()
    }

    /// Offset of the V tile of (block, head) in a layer, in elements.
    #[inline(always)]
    pub const fn value_tile(&self, block: usize, head: usize) -> usize {
        self.key_tile(block, head) + self.tile_len()
    }

    /// Keys side by side in a K tile.
    #[inline(always)]
    pub const fn key_group(&self) -> usize {
        if self.block_size == 8 { 8 } else { 16 }
    }

    /// Offset in a K tile of dimension `dim` of the token at `offset` in its block.
    #[inline(always)]
    pub const fn key_at(&self, offset: usize, dim: usize) -> usize {
        let keys = self.key_group();
        let (group, key) = (offset / keys, offset % keys);
        let group = group * keys * self.head_dim;
        match self.dtype {
            KvDType::F32 | KvDType::I8 => group + dim * keys + key,
            KvDType::Bf16 => group + (dim / 2 * keys + key) * 2 + 1 - dim % 2,
        }
    }

    /// Offset in a V tile of dimension `dim` of the token at `offset` in its block.
    #[inline(always)]
    pub const fn value_at(&self, offset: usize, dim: usize) -> usize {
        match self.dtype {
            KvDType::F32 | KvDType::I8 => offset * self.head_dim + dim,
            KvDType::Bf16 => (offset / 2 * self.head_dim + dim) * 2 + 1 - offset % 2,
        }
    }

    /// Offset in an `int8` tile of the scale of the token at `offset` in its block, in bytes.
    #[inline(always)]
    pub const fn scale_at(&self, offset: usize) -> usize {
        self.block_size * self.head_dim + offset * SCALE_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element of a tile is at one place, its scales behind them, and the tiles of a layer
    /// fill it.
    #[test]
    fn tiles_are_permutations() {
        for (block_size, head_dim) in [(8, 8), (16, 24), (32, 64), (48, 80)] {
            for dtype in KvDType::ALL {
                let layout =
                    KvLayout { num_blocks: 3, num_kv_heads: 2, block_size, head_dim, dtype };
                layout.check().unwrap();
                for at in [KvLayout::key_at, KvLayout::value_at] {
                    let mut seen = vec![false; layout.tile_len()];
                    for offset in 0..block_size {
                        for dim in 0..head_dim {
                            let place = at(&layout, offset, dim);
                            assert!(!seen[place], "({offset}, {dim}) shares {place}");
                            seen[place] = true;
                        }
                        let scale = if dtype == KvDType::I8 { layout.scale_at(offset) } else { 0 };
                        assert!(scale.is_multiple_of(SCALE_BYTES));
                        let bytes = if dtype == KvDType::I8 { scale..scale + 4 } else { 0..0 };
                        assert!(!seen[bytes.clone()].contains(&true), "scale {offset} is shared");
                        seen[bytes].fill(true);
                    }
                    assert!(!seen.contains(&false), "a hole in a tile");
                }
                assert!((layout.tile_len() * dtype.size()).is_multiple_of(32));
                assert_eq!(layout.value_tile(2, 1) + layout.tile_len(), layout.layer_len());
                assert_eq!(kv_layer_shape(layout).iter().product::<usize>(), layout.layer_len());
            }
        }
    }

    #[test]
    fn sizes_that_no_kernel_knows_are_refused() {
        let (block_size, head_dim, dtype) = (16, 64, KvDType::F32);
        let good = KvLayout { num_blocks: 1, num_kv_heads: 1, block_size, head_dim, dtype };
        for (block_size, head_dim) in [(0, 64), (12, 64), (24, 64), (16, 0), (16, 12), (16, 264)] {
            assert!(KvLayout { block_size, head_dim, ..good }.check().is_err());
        }
    }
}
