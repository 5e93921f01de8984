"""The rotary table: an angle for every position and pair of dimensions."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fastserve.models.config import RopeConfig

Floats = NDArray[np.float32]

_ROWS_AT_ONCE = 4096


def rope_table(
    rope: RopeConfig, rotary_dim: int, num_positions: int, divisors: Floats | None = None
) -> Floats:
    """Cosines, then sines, of every position: float32 ``[num_positions, rotary_dim]``.

    Angles are float32 by the operations of transformers, one after the other, so that they are
    equal: what rounding adds to an angle grows with the position. Their cosines and sines are taken
    in float64 and rounded once.

    Args:
        rope: The position embedding.
        rotary_dim: Dimensions of a head that are rotated.
        num_positions: Rows of the table.
        divisors: What a GGUF file divides the frequencies by, if it does.
    """
    frequencies = _frequencies(rope, rotary_dim)
    if divisors is not None:
        frequencies = frequencies / divisors
    half = rotary_dim // 2
    table = np.empty((num_positions, rotary_dim), np.float32)
    for first in range(0, num_positions, _ROWS_AT_ONCE):
        rows = table[first : first + _ROWS_AT_ONCE]
        positions = np.arange(first, first + len(rows), dtype=np.float32)[:, None]
        angles = (positions * frequencies).astype(np.float64)
        rows[:, :half] = np.cos(angles)
        rows[:, half:] = np.sin(angles)
    return table


def _frequencies(rope: RopeConfig, rotary_dim: int) -> Floats:
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    powers = (np.float64(rope.theta) ** exponents.astype(np.float64)).astype(np.float32)
    frequencies: Floats = np.float32(1) / powers
    if rope.kind == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, frequencies)
    return frequencies


def _llama3_frequencies(rope: RopeConfig, frequencies: Floats) -> Floats:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended.

    torch divides a number by a tensor as number × (1 / tensor), and so does this.
    """
    one, context = np.float32(1), np.float32(rope.original_max_positions)
    low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    wavelengths = one / frequencies * np.float32(2 * math.pi)
    stretched = frequencies / np.float32(rope.factor)
    span = np.float32(rope.high_freq_factor - rope.low_freq_factor)
    blend = (one / wavelengths * context - low) / span
    between = (one - blend) * stretched + blend * frequencies
    is_long = wavelengths > context / low
    is_short = wavelengths < context / high
    table: Floats = np.where(is_long, stretched, np.where(is_short, frequencies, between))
    return table
