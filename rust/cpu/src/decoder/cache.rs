//! Keys and values of all layers, in memory of the caller.

use std::marker::PhantomData;

use crate::error::{ArgumentError, require};
use crate::layout::KvLayout;
use crate::view::KvViewMut;

/// KV of all layers, one after the other, each as [`crate::layout`] says.
#[derive(Debug)]
pub struct KvCache<'a> {
    data: *mut u8,
    num_layers: usize,
    layout: KvLayout,
    lifetime: PhantomData<&'a mut [u8]>,
}

// SAFETY: an exclusive borrow of plain numbers.
unsafe impl Send for KvCache<'_> {}

impl KvCache<'_> {
    /// A cache in foreign memory.
    ///
    /// # Safety
    ///
    /// `data` points to `num_layers * layout.layer_len()` writable elements, aligned as
    /// [`KvDType::alignment`](crate::KvDType::alignment) says, that nobody else reads or writes for the
    /// lifetime.
    pub unsafe fn from_raw(data: *mut u8, num_layers: usize, layout: KvLayout) -> Self {
        Self { data, num_layers, layout, lifetime: PhantomData }
    }

    /// Layers that it has room for.
    pub const fn num_layers(&self) -> usize {
        self.num_layers
    }

    /// Shape of a layer.
    pub const fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// One layer. Panics if there is none of that index.
    pub fn layer(&mut self, index: usize) -> KvViewMut<'_> {
        // SAFETY: `start` is inside the memory that `from_raw` was promised.
        unsafe { KvViewMut::from_raw(self.start(index), self.layout) }
    }

    fn start(&self, layer: usize) -> *mut u8 {
        assert!(layer < self.num_layers, "layer {layer} of {}", self.num_layers);
        self.data.wrapping_add(layer * self.layout.layer_len() * self.layout.dtype.size())
    }

    /// Copy blocks, pair after pair of source and destination, in every layer.
    ///
    /// # Errors
    ///
    /// A block that is not there, or half a pair; nothing is copied.
    pub(super) fn copy_blocks(&mut self, pairs: &[i32]) -> Result<(), ArgumentError> {
        let num_blocks = self.layout.num_blocks;
        require(
            pairs.len().is_multiple_of(2),
            "copies",
            || format!("{} words", pairs.len()),
            || "two a copy".into(),
        )?;
        let wrong =
            pairs.iter().find(|&&id| usize::try_from(id).map_or(true, |id| id >= num_blocks));
        if let Some(id) = wrong {
            let want = format!("0 to {}", num_blocks.saturating_sub(1));
            return Err(ArgumentError::new("copies", id.to_string(), want));
        }
        let KvLayout { num_kv_heads, dtype, .. } = self.layout;
        let size = num_kv_heads * 2 * self.layout.tile_len() * dtype.size();
        for layer in 0..self.num_layers {
            let start = self.start(layer);
            for pair in pairs.chunks_exact(2) {
                // Checked before; checked again because foreign memory may have changed.
                let [from, into] = [pair[0], pair[1]].map(|id| id as usize);
                assert!(
                    from < num_blocks && into < num_blocks,
                    "a copied block is outside the pool"
                );
                let [from, into] = [from, into].map(|block| start.wrapping_add(block * size));
                // SAFETY: two whole blocks of this layer, which may be the same one.
                unsafe { into.copy_from(from, size) };
            }
        }
        Ok(())
    }
}
