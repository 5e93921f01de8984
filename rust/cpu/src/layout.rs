//! Where a key or a value lies: the physical layout of a KV block, in this one place.
//!
//! All layers' KV is one C-contiguous array
//!
//! ```text
//! kv[num_layers, num_blocks, num_kv_heads, 2, block_size * head_dim]     2 = (K tile, V tile)
//! ```
//!
//! of `float32` or `bfloat16`. Outside this crate a tile is opaque; a block is copied by copying
//! `kv[:, block]`. The last axis, written out (G = 8 if `block_size` is 8, otherwise 16):
//!
//! ```text
//!            K tile                                V tile
//! float32    [block_size / G][head_dim][G]         [block_size][head_dim]
//! bfloat16   [block_size / G][head_dim / 2][G][2]  [block_size / 2][head_dim][2]
//! ```
//!
//! Why. A score is a dot product over `head_dim`. With G keys side by side, one vector register
//! holds one dimension of G keys, so scores of G keys are accumulated with no horizontal sum. The
//! weighted sum of values runs over tokens, so there the dimensions lie side by side. `bfloat16`
//! comes in pairs along the axis of summation: widening is then one shift for the first and one
//! mask for the second of a pair, and it is the order that bf16 dot-product instructions read.
//! K and V of one (block, head) are neighbours, so that a block is one run of memory to stream.

use crate::element::DType;
use crate::error::{ArgumentError, require};

/// Widest head: scratch rows have this many elements.
pub const MAX_HEAD_DIM: usize = 256;

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

    /// Elements of one K or V tile.
    pub const fn tile_len(&self) -> usize {
        self.block_size * self.head_dim
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
    pub const fn key_at(&self, dtype: DType, offset: usize, dim: usize) -> usize {
        let keys = self.key_group();
        let (group, key) = (offset / keys, offset % keys);
        let group = group * keys * self.head_dim;
        match dtype {
            DType::F32 => group + dim * keys + key,
            DType::Bf16 => group + (dim / 2 * keys + key) * 2 + dim % 2,
        }
    }

    /// Offset in a V tile of dimension `dim` of the token at `offset` in its block.
    #[inline(always)]
    pub const fn value_at(&self, dtype: DType, offset: usize, dim: usize) -> usize {
        match dtype {
            DType::F32 => offset * self.head_dim + dim,
            DType::Bf16 => (offset / 2 * self.head_dim + dim) * 2 + offset % 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element of a tile is at one place, and the tiles of a layer fill it.
    #[test]
    fn tiles_are_permutations() {
        for (block_size, head_dim) in [(8, 8), (16, 24), (32, 64), (48, 80)] {
            let layout = KvLayout { num_blocks: 3, num_kv_heads: 2, block_size, head_dim };
            layout.check().unwrap();
            for dtype in [DType::F32, DType::Bf16] {
                for at in [KvLayout::key_at, KvLayout::value_at] {
                    let mut seen = vec![false; layout.tile_len()];
                    for offset in 0..block_size {
                        for dim in 0..head_dim {
                            let place = at(&layout, dtype, offset, dim);
                            assert!(!seen[place], "({offset}, {dim}) shares {place}");
                            seen[place] = true;
                        }
                    }
                }
            }
            assert_eq!(layout.value_tile(2, 1) + layout.tile_len(), layout.layer_len());
            assert_eq!(kv_layer_shape(layout).iter().product::<usize>(), layout.layer_len());
        }
    }

    #[test]
    fn sizes_that_no_kernel_knows_are_refused() {
        let good = KvLayout { num_blocks: 1, num_kv_heads: 1, block_size: 16, head_dim: 64 };
        for (block_size, head_dim) in [(0, 64), (12, 64), (24, 64), (16, 0), (16, 12), (16, 264)] {
            assert!(KvLayout { block_size, head_dim, ..good }.check().is_err());
        }
    }
}
