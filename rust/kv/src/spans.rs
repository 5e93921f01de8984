//! Spans that tree nodes are keyed by: lists in one arena, for the few nodes that have any.
//!
//! A block's key holds every span that overlaps it, whole: start, end and digest. Positions count from
//! the start of the sequence, and equal blocks stand at equal depth, so lists compare as they are.
//!
//! The arena is sized for one span a block. A pool with more than that grows it, which is the one
//! allocation after construction that a prompt can cause.

use std::num::NonZeroU32;

use fastserve_base::{Span, Token};

/// A list in a [`SpanArena`]. `None` inside is the empty list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SpanList(Option<CellId>);

/// Index of a cell, plus one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CellId(NonZeroU32);

impl CellId {
    fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

#[derive(Debug, Clone, Copy)]
struct Cell {
    span: Span,
    next: SpanList,
}

/// Lists of spans. A cell is in one list or free.
#[derive(Clone)]
pub(crate) struct SpanArena {
    cells: Vec<Cell>,
    free: SpanList,
}

impl SpanArena {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { cells: Vec::with_capacity(capacity), free: SpanList(None) }
    }

    /// Store a copy of `spans`.
    pub(crate) fn store(&mut self, spans: &[Span]) -> SpanList {
        let mut list = SpanList(None);
        for &span in spans.iter().rev() {
            let cell = Cell { span, next: list };
            list = if let SpanList(Some(id)) = self.free {
                self.free = self.cells[id.index()].next;
                self.cells[id.index()] = cell;
                SpanList(Some(id))
            } else {
                self.cells.push(cell);
                SpanList(NonZeroU32::new(self.cells.len() as u32).map(CellId))
            };
        }
        list
    }

    /// Give back the cells of a list.
    pub(crate) fn release(&mut self, mut list: SpanList) {
        while let SpanList(Some(id)) = list {
            let cell = &mut self.cells[id.index()];
            (list, cell.next, self.free) = (cell.next, self.free, list);
        }
    }

    /// Whether a list holds exactly `spans`.
    #[inline]
    pub(crate) fn equals(&self, list: SpanList, spans: &[Span]) -> bool {
        self.iter(list).eq(spans)
    }

    /// The spans of a list, in order.
    pub(crate) fn iter(&self, list: SpanList) -> impl Iterator<Item = &Span> {
        let mut rest = list;
        std::iter::from_fn(move || {
            let SpanList(Some(id)) = rest else {
                return None;
            };
            let cell = &self.cells[id.index()];
            rest = cell.next;
            Some(&cell.span)
        })
    }

    /// Give back every list at once.
    pub(crate) fn clear(&mut self) {
        self.cells.clear();
        self.free = SpanList(None);
    }

    /// Cells in lists that have not been given back. O(cells).
    pub(crate) fn num_live(&self) -> usize {
        self.cells.len() - self.iter(self.free).count()
    }
}

/// Those of `spans` that overlap block `index`. `spans` are sorted and do not overlap.
#[inline]
pub(crate) fn overlapping<'a>(spans: &'a [Span], index: usize, block: &[Token]) -> &'a [Span] {
    if spans.is_empty() {
        return spans;
    }
    let start = index * block.len();
    let end = start + block.len();
    let first = spans.partition_point(|span| span.end as usize <= start);
    let num = spans[first..].partition_point(|span| (span.start as usize) < end);
    &spans[first..first + num]
}

#[cfg(test)]
mod tests;
