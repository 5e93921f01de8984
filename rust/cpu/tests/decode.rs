//! Decoded blocks, against their definition: bit by bit, for every format and both types.
//!
//! Scales that are not finite are tested against the `gguf` package, in `tests/test_weights_gguf.py`.

mod common;

use common::Noise;
use common::blocks::{meaning, random_block};
use fastserve_cpu::{Bf16, WeightFormat, decode};

#[test]
fn every_format() {
    let mut noise = Noise::new(1);
    for format in WeightFormat::OF_FILES {
        for num_blocks in [0, 1, 2, 7, 100] {
            let (mut bytes, mut numbers) = (Vec::new(), Vec::new());
            for _ in 0..num_blocks {
                let block = random_block(format, &mut noise);
                numbers.extend(meaning(format, &block));
                bytes.extend(block);
            }
            let mut wide = vec![f32::NAN; numbers.len()];
            decode(format, &bytes, &mut wide).unwrap();
            let bits = |numbers: &[f32]| numbers.iter().map(|n| n.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&wide), bits(&numbers), "{format:?}");

            let mut narrow = vec![Bf16::from_f32(f32::NAN); numbers.len()];
            decode(format, &bytes, &mut narrow).unwrap();
            let rounded: Vec<Bf16> = numbers.iter().copied().map(Bf16::from_f32).collect();
            assert_eq!(narrow, rounded, "{format:?}");
        }
    }
}

#[test]
fn refusals_name_the_argument() {
    for (format, num_bytes, len, want) in [
        (
            WeightFormat::Q8_0,
            34,
            33,
            "out: got 33 numbers, want a multiple of 32, which Q8_0 has to a block",
        ),
        (
            WeightFormat::Q6K,
            209,
            256,
            "blocks: got 209 bytes, want 210, which 256 numbers in Q6_K take",
        ),
        (WeightFormat::F16, 6, 2, "blocks: got 6 bytes, want 4, which 2 numbers in F16 take"),
    ] {
        let mut out = vec![9.0_f32; len];
        let error = decode(format, &vec![0; num_bytes], &mut out).unwrap_err();
        assert_eq!(error.to_string(), want);
        assert!(out.iter().all(|number| number.to_bits() == 9_f32.to_bits()), "nothing is written");
    }
}
