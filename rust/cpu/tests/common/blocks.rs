//! Blocks of every number format, and what they mean by their definition.

use fastserve_cpu::WeightFormat;

use super::Noise;

/// Any bits are a block, but for scales, which are finite and neither huge nor tiny.
pub(crate) fn random_block(format: WeightFormat, noise: &mut Noise) -> Vec<u8> {
    let mut block: Vec<u8> = (0..format.block_bytes()).map(|_| noise.below(256) as u8).collect();
    let mut half = |at: usize, block: &mut Vec<u8>| {
        // Sign, an exponent from 2^-9 to 2^-2, any fraction; now and then a subnormal number.
        let exponent = if noise.below(50) == 0 { 0 } else { 6 + noise.below(8) };
        let bits = noise.below(2) << 15 | exponent << 10 | noise.below(1024);
        block[at..at + 2].copy_from_slice(&(bits as u16).to_le_bytes());
    };
    match format {
        WeightFormat::F32 | WeightFormat::I8 => block = noise.next().to_le_bytes().to_vec(),
        WeightFormat::Bf16 => block = ((noise.next().to_bits() >> 16) as u16).to_le_bytes().into(),
        WeightFormat::F16 | WeightFormat::Q8_0 | WeightFormat::Q4_0 => half(0, &mut block),
        WeightFormat::Q4_1 | WeightFormat::Q4K => {
            half(0, &mut block);
            half(2, &mut block);
        }
        WeightFormat::Q6K => half(208, &mut block),
    }
    block
}

/// IEEE binary16 by its definition, in `f64`.
fn half(bytes: &[u8]) -> f32 {
    let bits = u16::from_le_bytes([bytes[0], bytes[1]]);
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    assert!(exponent < 31);
    let value = if exponent == 0 {
        fraction * 2_f64.powi(-24)
    } else {
        (1024.0 + fraction) * 2_f64.powi(exponent - 25)
    };
    (if bits >> 15 == 1 { -value } else { value }) as f32
}

/// The numbers of a block, as the `gguf` package's `quants.py` defines them.
pub(crate) fn meaning(format: WeightFormat, block: &[u8]) -> Vec<f32> {
    let nibble = |byte: u8, high: bool| f32::from(if high { byte >> 4 } else { byte & 15 });
    match format {
        WeightFormat::F32 => vec![f32::from_le_bytes(block.try_into().unwrap())],
        WeightFormat::F16 => vec![half(block)],
        WeightFormat::Bf16 => {
            vec![f32::from_bits(u32::from(u16::from_le_bytes([block[0], block[1]])) << 16)]
        }
        WeightFormat::Q8_0 => {
            block[2..].iter().map(|&byte| f32::from(byte as i8) * half(block)).collect()
        }
        WeightFormat::Q4_0 => {
            (0..32).map(|k| (nibble(block[2 + k % 16], k >= 16) - 8.0) * half(block)).collect()
        }
        WeightFormat::Q4_1 => (0..32)
            .map(|k| nibble(block[4 + k % 16], k >= 16) * half(block) + half(&block[2..]))
            .collect(),
        WeightFormat::Q4K => (0..256)
            .map(|k| {
                let (group, s) = (k / 32, &block[4..16]);
                let (scale, min) = match group {
                    0..4 => (s[group] % 64, s[group + 4] % 64),
                    _ => (
                        s[group + 4] % 16 + s[group - 4] / 64 * 16,
                        s[group + 4] / 16 + s[group] / 64 * 16,
                    ),
                };
                let byte = block[16 + group / 2 * 32 + k % 32];
                let scale = f32::from(scale) * half(block);
                let min = f32::from(min) * half(&block[2..]);
                nibble(byte, group % 2 == 1) * scale - min
            })
            .collect(),
        WeightFormat::Q6K => (0..256)
            .map(|k| {
                let (part, run, column) = (k / 128, k % 128 / 32, k % 32);
                let low = nibble(block[part * 64 + run % 2 * 32 + column], run >= 2);
                let high = block[128 + part * 32 + column] >> (2 * run) & 3;
                let scale = f32::from(block[192 + k / 16] as i8) * half(&block[208..]);
                (low + 16.0 * f32::from(high) - 32.0) * scale
            })
            .collect(),
        WeightFormat::I8 => unreachable!("no file has it"),
    }
}
