//! One layer of keys and values, filled element by element as the layout says.

use fastserve_cpu::{Bf16, KvDType, KvLayout, KvView, KvViewMut};

/// Where `(offset, dim)` lies in a tile.
pub(crate) type Place = fn(&KvLayout, usize, usize) -> usize;

/// A head of one token as int8, by the definition in plain arithmetic: the scale and the numbers.
pub(crate) fn quantized(x: &[f32]) -> (f32, Vec<i8>) {
    if x.iter().any(|x| !x.is_finite()) {
        return (f32::NAN, vec![0; x.len()]);
    }
    let largest = x.iter().fold(0_f32, |largest, x| largest.max(x.abs()));
    // Below the smallest normal scale, 2^-126.
    if f64::from(largest) < 127.0 * 2_f64.powi(-126) {
        return (0.0, vec![0; x.len()]);
    }
    let scale = largest / 127.0;
    (scale, x.iter().map(|x| (x / scale).round_ties_even() as i8).collect())
}

/// What a head of one token is after it was stored.
pub(crate) fn as_stored(dtype: KvDType, x: &[f32]) -> Vec<f64> {
    match dtype {
        KvDType::F32 => x.iter().map(|&x| f64::from(x)).collect(),
        KvDType::Bf16 => x.iter().map(|&x| f64::from(Bf16::from_f32(x).to_f32())).collect(),
        KvDType::I8 => {
            let (scale, numbers) = quantized(x);
            numbers.into_iter().map(|n| f64::from(n) * f64::from(scale)).collect()
        }
    }
}

/// Memory of a layer. What nobody wrote is NaN: all bits are set.
#[derive(Debug, Clone)]
pub(crate) struct Cache {
    pub(crate) layout: KvLayout,
    words: Vec<u32>,
}

impl Cache {
    pub(crate) fn poisoned(layout: KvLayout) -> Self {
        let num_bytes = layout.layer_len() * layout.dtype.size();
        assert!(num_bytes.is_multiple_of(4));
        Self { layout, words: vec![u32::MAX; num_bytes / 4] }
    }

    pub(crate) fn view(&self) -> KvView<'_> {
        // SAFETY: a whole layer, aligned to four, borrowed for the view.
        unsafe { KvView::from_raw(self.words.as_ptr().cast(), self.layout) }
    }

    pub(crate) fn view_mut(&mut self) -> KvViewMut<'_> {
        // SAFETY: as above, exclusively.
        unsafe { KvViewMut::from_raw(self.words.as_mut_ptr().cast(), self.layout) }
    }

    /// All bits.
    pub(crate) fn bits(&self) -> &[u32] {
        &self.words
    }

    /// Store one head's key and value of the token in `slot`.
    pub(crate) fn write(&mut self, slot: usize, head: usize, key: &[f32], value: &[f32]) {
        let layout = self.layout;
        let block = slot / layout.block_size;
        let (keys, values) = (layout.key_tile(block, head), layout.value_tile(block, head));
        self.write_one(keys, KvLayout::key_at, slot % layout.block_size, key);
        self.write_one(values, KvLayout::value_at, slot % layout.block_size, value);
    }

    fn write_one(&mut self, tile: usize, place: Place, offset: usize, x: &[f32]) {
        let layout = self.layout;
        let at = |dim| (tile + place(&layout, offset, dim)) * layout.dtype.size();
        match layout.dtype {
            KvDType::F32 => {
                x.iter().enumerate().for_each(|(dim, x)| self.put(at(dim), x.to_ne_bytes()));
            }
            KvDType::Bf16 => {
                let bytes = |x: &f32| Bf16::from_f32(*x).0.to_ne_bytes();
                x.iter().enumerate().for_each(|(dim, x)| self.put(at(dim), bytes(x)));
            }
            KvDType::I8 => {
                let (scale, numbers) = quantized(x);
                self.put(tile + layout.scale_at(offset), scale.to_ne_bytes());
                numbers.iter().enumerate().for_each(|(dim, n)| self.put(at(dim), n.to_ne_bytes()));
            }
        }
    }

    /// Write bytes that lie in one word.
    fn put<const N: usize>(&mut self, at: usize, bytes: [u8; N]) {
        let mut word = self.words[at / 4].to_ne_bytes();
        word[at % 4..at % 4 + N].copy_from_slice(&bytes);
        self.words[at / 4] = u32::from_ne_bytes(word);
    }
}
