//! Packed weights: what they are stored as, and where each number is.

use std::fmt;

use super::pack::{self, Rows};
use super::quantize;
use super::stored::FOUR;
use crate::error::{ArgumentError, require};
use crate::simd::{LANES, MAX_COLS};

/// Panels that one strip of work has at most: as many as a tile for one row.
pub(super) const PANELS_PER_STRIP: usize = 4;

/// Bytes that panels are aligned to.
pub(super) const LINE: usize = 64;

/// Number format of a weight's rows: that of a file, or int8, which rows of `f32` become when they are
/// packed. The block formats are those of GGUF files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightFormat {
    /// IEEE binary32.
    F32,
    /// IEEE binary16; kept as `F32`.
    F16,
    /// Upper half of a binary32.
    Bf16,
    /// 32 bytes and a scale.
    Q8_0,
    /// 32 half bytes and a scale, around zero.
    Q4_0,
    /// 32 half bytes, a scale and a minimum.
    Q4_1,
    /// 8 times 32 half bytes with a scale and a minimum each, which have scales of their own.
    Q4K,
    /// 16 times 16 numbers of six bits with a scale each, which have a scale of their own.
    Q6K,
    /// One int8 a number and one `f32` scale a row. Rows are given as `F32`.
    I8,
}

impl WeightFormat {
    /// Those that files have.
    pub const OF_FILES: [Self; 8] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q4K,
        Self::Q6K,
    ];

    /// The name that GGUF has for it, where it has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q4K => "Q4_K",
            Self::Q6K => "Q6_K",
            Self::I8 => "I8",
        }
    }

    /// The format called `name`, if there is one.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::OF_FILES.into_iter().chain([Self::I8]).find(|format| format.name() == name)
    }

    /// Numbers of a block as it is given.
    pub const fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 | Self::I8 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 => 32,
            Self::Q4K | Self::Q6K => 256,
        }
    }

    /// Bytes of a block as it is given.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 | Self::I8 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q4K => 144,
            Self::Q6K => 210,
        }
    }

    /// Bytes of a block of all 16 rows of a panel.
    pub(super) const fn panel_block_bytes(self) -> usize {
        match self {
            Self::F32 | Self::F16 => 4 * LANES,
            Self::Bf16 => 2 * LANES,
            Self::I8 => LANES,
            // Two bytes a row more than the file's, since the 6-bit scales are whole bytes here.
            Self::Q4K => (144 + 4) * LANES,
            _ => self.block_bytes() * LANES,
        }
    }

    /// Bytes of a panel behind its last block.
    const fn panel_tail_bytes(self) -> usize {
        match self {
            Self::I8 => quantize::TAIL_BYTES,
            _ => 0,
        }
    }

    /// Most numbers of a row, and why.
    const fn max_cols(self) -> (usize, &'static str) {
        match self {
            Self::I8 => (MAX_COLS, "131072, so that sums of I8 fit 32 bits"),
            _ => (1 << 24, "2^24"),
        }
    }
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "read through a pointer")] [u8; LINE]);

/// Rows of one format, in panels. The last panel is filled up with zeros.
pub struct Packed {
    format: WeightFormat,
    num_rows: usize,
    num_cols: usize,
    /// Bytes of a panel.
    stride: usize,
    memory: Vec<Line>,
}

impl Packed {
    /// Room for `[num_rows, num_cols]`, all zeros.
    ///
    /// # Errors
    ///
    /// No rows, `num_cols` is 0, over 2^24 (for I8 over 2^17) or not whole blocks of the format, or there
    /// is no memory.
    pub fn new(
        format: WeightFormat,
        num_rows: usize,
        num_cols: usize,
    ) -> Result<Self, ArgumentError> {
        let block = format.block_elements();
        let (max_cols, most) = format.max_cols();
        require(
            num_cols > 0 && num_cols <= max_cols && num_cols.is_multiple_of(block),
            "num_cols",
            || num_cols.to_string(),
            || format!("a multiple of {block}, which {} has to a block, to {most}", format.name()),
        )?;
        require(
            (1..=1 << 32).contains(&num_rows),
            "num_rows",
            || num_rows.to_string(),
            || "1 to 2^32".to_owned(),
        )?;
        // Formats without blocks are read four positions at a time.
        let padded = num_cols.next_multiple_of(FOUR);
        let num_bytes = padded / block * format.panel_block_bytes() + format.panel_tail_bytes();
        let stride = num_bytes.next_multiple_of(LINE);
        let num_lines = num_rows.div_ceil(LANES).saturating_mul(stride / LINE);
        let mut memory = Vec::new();
        memory.try_reserve_exact(num_lines).map_err(|_| {
            let got = format!("{num_rows}, which take {} bytes", num_lines.saturating_mul(LINE));
            ArgumentError::out_of_memory("num_rows", got)
        })?;
        memory.resize(num_lines, Line([0; LINE]));
        Ok(Self { format, num_rows, num_cols, stride, memory })
    }

    /// Store rows `first_row..` from their bytes in the format of a file (`f32` for I8, which quantizes
    /// them), row after row.
    ///
    /// # Errors
    ///
    /// `rows` is not a whole number of rows, they reach past the last one, or they are to become I8 and
    /// are not finite. Nothing is stored.
    pub fn fill(&mut self, first_row: usize, rows: &[u8]) -> Result<(), ArgumentError> {
        let row_bytes = self.row_bytes();
        let count = rows.len() / row_bytes;
        let fits = rows.len().is_multiple_of(row_bytes)
            && first_row.checked_add(count).is_some_and(|end| end <= self.num_rows);
        require(
            fits,
            "rows",
            || format!("{} bytes from row {first_row} on", rows.len()),
            || format!("rows of {row_bytes} bytes, to row {} at most", self.num_rows),
        )?;
        if self.format == WeightFormat::I8 {
            quantize::check_finite(rows)?;
        }
        let (format, stride) = (self.format, self.stride);
        for (row, bytes) in (first_row..).zip(rows.chunks_exact(row_bytes)) {
            let panel = &mut self.bytes_mut()[row / LANES * stride..][..stride];
            pack::row(format, Rows { panel, lane: row % LANES }, bytes);
        }
        Ok(())
    }

    /// Number format.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Rows.
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Numbers of a row.
    pub fn num_cols(&self) -> usize {
        self.num_cols
    }

    /// Bytes of a row as [`fill`](Self::fill) takes it.
    pub fn row_bytes(&self) -> usize {
        self.num_cols / self.format.block_elements() * self.format.block_bytes()
    }

    /// Memory that it takes.
    pub fn num_bytes(&self) -> usize {
        self.memory.len() * LINE
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.num_bytes();
        // SAFETY: lines are bytes without padding.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), len) }
    }

    /// Bytes of a panel before position `col`; inside a block, about as many.
    #[inline(always)]
    pub(super) fn bytes_before(&self, col: usize) -> usize {
        col * self.format.panel_block_bytes() / self.format.block_elements()
    }

    /// Start of a panel.
    #[inline(always)]
    pub(super) fn panel(&self, panel: usize) -> *const u8 {
        assert!(panel * self.stride < self.memory.len() * LINE);
        self.memory.as_ptr().cast::<u8>().wrapping_add(panel * self.stride)
    }
}

impl fmt::Debug for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Packed([{}, {}] {})", self.num_rows, self.num_cols, self.format.name())
    }
}

/// Up to [`PANELS_PER_STRIP`] panels of one part: what a thread works on at a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Strip {
    pub(super) part: usize,
    pub(super) first_panel: usize,
    pub(super) num_panels: usize,
    /// First row of the weight, which is a column of the result.
    pub(super) first_row: usize,
    /// Rows of the weight in it: fewer than 16 a panel at the end of a part.
    pub(super) num_rows: usize,
}

/// A weight of one or more parts, one below the other, each in a format of its own.
#[derive(Debug)]
pub struct Weight {
    parts: Vec<Packed>,
    strips: Vec<Strip>,
    num_rows: usize,
}

impl Weight {
    /// A weight of these parts.
    ///
    /// # Errors
    ///
    /// There are none, or their rows have not the same length.
    pub fn new(parts: Vec<Packed>) -> Result<Self, ArgumentError> {
        Self::check(&parts)?;
        let mut strips = Vec::new();
        let mut before = 0;
        for (part, packed) in parts.iter().enumerate() {
            let num_panels = packed.num_rows.div_ceil(LANES);
            for first_panel in (0..num_panels).step_by(PANELS_PER_STRIP) {
                let first = first_panel * LANES;
                strips.push(Strip {
                    part,
                    first_panel,
                    num_panels: PANELS_PER_STRIP.min(num_panels - first_panel),
                    first_row: before + first,
                    num_rows: (PANELS_PER_STRIP * LANES).min(packed.num_rows - first),
                });
            }
            before += packed.num_rows;
        }
        Ok(Self { parts, strips, num_rows: before })
    }

    /// Whether these parts make a weight.
    ///
    /// # Errors
    ///
    /// As for [`Weight::new`].
    pub fn check(parts: &[Packed]) -> Result<(), ArgumentError> {
        let lengths = || {
            let lengths: Vec<_> = parts.iter().map(|part| part.num_cols.to_string()).collect();
            format!("{} with {} columns", parts.len(), lengths.join(", "))
        };
        let is_one = parts.windows(2).all(|pair| pair[0].num_cols == pair[1].num_cols);
        require(!parts.is_empty() && is_one, "parts", lengths, || {
            "at least one, all with as many columns".to_owned()
        })
    }

    /// Rows of all parts: columns of a result.
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Numbers of a row.
    pub fn num_cols(&self) -> usize {
        self.parts[0].num_cols
    }

    /// Memory that it takes.
    pub fn num_bytes(&self) -> usize {
        self.parts.iter().map(Packed::num_bytes).sum()
    }

    /// The parts, in order.
    pub fn parts(&self) -> &[Packed] {
        &self.parts
    }

    /// Check that it can be a gate above up: each half of the rows is whole strips, of as many rows.
    ///
    /// # Errors
    ///
    /// It cannot; the argument is called `name`.
    pub(crate) fn check_halves(&self, name: &'static str) -> Result<(), ArgumentError> {
        let (first, second) = self.strips.split_at(self.strips.len() / 2);
        let half = self.num_rows / 2;
        let expected = first.iter().map(|strip| (strip.first_row + half, strip.num_rows));
        let is_halves = expected.eq(second.iter().map(|strip| (strip.first_row, strip.num_rows)));
        let got = || {
            let rows: Vec<_> = self.parts.iter().map(|part| part.num_rows.to_string()).collect();
            format!("parts of {} rows", rows.join(", "))
        };
        require(is_halves, name, got, || "two halves of equal parts".to_owned())
    }

    #[inline(always)]
    pub(super) fn strips(&self) -> &[Strip] {
        &self.strips
    }
}
