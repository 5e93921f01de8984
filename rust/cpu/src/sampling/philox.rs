//! Random bits that are a function and not a state: Philox4x32-10.
//!
//! Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). How its
//! counters are used here is told in `python/fastserve/philox.py`.

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// Third counter word of the bits that pick a token.
const PURPOSE_SAMPLE: u32 = 0;

/// Four random words for a counter and a key.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    for _ in 0..ROUNDS {
        let products = [
            u64::from(MULTIPLIERS[0]) * u64::from(c[0]),
            u64::from(MULTIPLIERS[1]) * u64::from(c[2]),
        ];
        let high = products.map(|product| (product >> 32) as u32);
        let low = products.map(|product| product as u32);
        c = [high[1] ^ c[1] ^ k[0], low[1], high[0] ^ c[3] ^ k[1], low[0]];
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
    }
    c
}

/// The 64 bits that pick a sequence's token at a position.
pub fn draw_bits(seed: u64, sequence_index: u32, position: u32) -> u64 {
    let counter = [position, sequence_index, PURPOSE_SAMPLE, 0];
    let words = philox4x32(counter, [seed as u32, (seed >> 32) as u32]);
    u64::from(words[0]) | (u64::from(words[1]) << 32)
}
