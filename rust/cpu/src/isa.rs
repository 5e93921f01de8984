//! Instruction sets: which there are, and which this machine has.

/// An instruction set that kernels are compiled for. Ordered: a later one has all of those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust: any machine.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    Avx512,
    /// The same and VNNI, which products of int8 use. Everything else is as with `Avx512`.
    Vnni,
    /// The same and BF16, which products of bfloat16 use. Every processor that has it has VNNI.
    Avx512Bf16,
}

impl Isa {
    /// Every one, the plainest first.
    pub const ALL: [Self; 5] =
        [Self::Portable, Self::Avx2, Self::Avx512, Self::Vnni, Self::Avx512Bf16];

    /// The name that [`Isa::from_name`] takes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Vnni => "vnni",
            Self::Avx512Bf16 => "avx512bf16",
        }
    }

    /// The instruction set called `name`, if there is one.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|isa| isa.name() == name)
    }

    /// Whether this machine can run it.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx512 = || {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            };
            match self {
                Self::Portable => true,
                Self::Avx2 => {
                    is_x86_feature_detected!("avx2")
                        && is_x86_feature_detected!("fma")
                        && is_x86_feature_detected!("f16c")
                }
                Self::Avx512 => avx512(),
                Self::Vnni => avx512() && is_x86_feature_detected!("avx512vnni"),
                Self::Avx512Bf16 => {
                    Self::Vnni.is_available() && is_x86_feature_detected!("avx512bf16")
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable
        }
    }

    /// Those that this machine can run, the plainest first.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The best that this machine can run.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Self::Portable)
    }
}
