"""Paged attention on the GPU's kernels, run by the emulator, against float64."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_attention import RANGE, Rows, Shape, attend, make_rows, reference
from cuda_launch import CUDA
from cuda_numbers import ROUNDING, loaded
from fastserve.kernels.instantiations import Instantiations, cover

LISTED = Instantiations.read(CUDA / "instantiations.toml")
COVER = [
    Shape(macros["SCALAR"], int(macros["HEAD_DIM"]), int(macros["BLOCK_SIZE"]))
    for macros in (
        dict(one.macros) for one in cover(one for one in LISTED.all if one.kernel == "paged_chunk")
    )
]
SMALL = Shape("__nv_bfloat16", 64, 16, group=3, num_kv_heads=2)
EXACT = Shape("float", 64, 16, group=3, num_kv_heads=2)
# Lengths at the edges of tiles, blocks, units and ranges.
LENGTHS = st.one_of(
    st.integers(1, 80),
    st.sampled_from([15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]),
    st.sampled_from([255, 256, 257, 320, 511, 512, 513]),
)


def assert_close(shape: Shape, rows: Rows, got: np.ndarray, spread: float = 1.0) -> None:
    """Within what rounding costs: of weights and results, and of scores, which are exponents."""
    want = reference(shape, rows)
    tolerance = 8 * ROUNDING[shape.scalar] + 2e-6 * spread
    np.testing.assert_allclose(
        loaded(got, shape.scalar), want, rtol=tolerance, atol=tolerance, equal_nan=True
    )


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Rows: decoding, chunks over any context, padding."""
    sizes = []
    for _ in range(draw(st.integers(1, 4))):
        keys = draw(LENGTHS)
        kind = draw(st.sampled_from(["decode", "decode", "chunk", "prompt", "padding"]))
        if kind == "padding":
            sizes.append((draw(st.integers(0, 2)), 0))
        elif kind == "decode":
            sizes.append((1, keys))
        else:
            most = keys if kind == "prompt" else min(keys, 70)
            sizes.append((draw(st.integers(1, most)), keys))
    return sizes if any(keys for _, keys in sizes) else [*sizes, (1, 1)]


@pytest.mark.parametrize(
    "shape", COVER, ids=lambda shape: f"{shape.scalar}-{shape.head_dim}-{shape.block_size}"
)
def test_rows_agree_with_float64(shape: Shape) -> None:
    @settings(max_examples=6, deadline=None, database=None, derandomize=True)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        told = Shape(
            shape.scalar,
            shape.head_dim,
            shape.block_size,
            group=data.draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16])),
            num_kv_heads=data.draw(st.integers(1, 2)),
            window=data.draw(st.sampled_from([0, 0, 1, 16, 100, 300])),
            soft_cap=data.draw(st.sampled_from([0.0, 0.0, 5.0])),
        )
        random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        sizes = data.draw(steps())
        shared = data.draw(st.integers(0, 3))
        rows = make_rows(random, told, sizes, num_shared_blocks=shared)
        order = data.draw(st.integers(0, 5))
        guard = data.draw(st.sampled_from(["start", "end"]))
        assert_close(told, rows, attend(told, rows, order=order, guard=guard))

    run()


@pytest.mark.parametrize("shape", [SMALL, EXACT], ids=["bf16", "float"])
@pytest.mark.parametrize("keys", [1, 16, 64, 65, 256, 257, 600, 1024])
def test_long_rows(shape: Shape, keys: int) -> None:
    rows = make_rows(np.random.default_rng(keys), shape, [(1, keys), (min(keys, 40), keys)])
    assert_close(shape, rows, attend(shape, rows, extra_ranges=2))


@pytest.mark.parametrize("shape", [SMALL, EXACT], ids=["bf16", "float"])
def test_large_scores(shape: Shape) -> None:
    """One weight is all but 1: the maximum moves from unit to unit, the rest underflows."""
    rows = make_rows(np.random.default_rng(3), shape, [(1, 700), (5, 300)], spread=40.0)
    assert_close(shape, rows, attend(shape, rows), spread=40.0)


@pytest.mark.parametrize("shape", [SMALL, EXACT], ids=["bf16", "float"])
@pytest.mark.parametrize("window", [0, 100])
def test_a_row_has_the_same_bits_in_any_company(shape: Shape, window: int) -> None:
    told = Shape(shape.scalar, 64, 16, 3, 2, window=window)
    sizes = [(1, 300), (70, 90), (0, 0), (1, 17), (33, 500), (1, 256), (1, 700)]
    rows = make_rows(np.random.default_rng(0), told, sizes, num_shared_blocks=2)
    together = attend(told, rows, order=1, guard="start")
    for row, (_, keys) in enumerate(sizes):
        if keys:
            first, end = rows.query_indptr[row : row + 2].tolist()
            alone = attend(told, rows.only(row), extra_ranges=row % 2, order=row)
            assert alone.tobytes() == together[first:end].tobytes(), f"row {row}"


@pytest.mark.parametrize("shape", [SMALL, EXACT], ids=["bf16", "float"])
@pytest.mark.parametrize("window", [0, 100])
def test_chunks_and_decoding_have_the_same_bits(shape: Shape, window: int) -> None:
    """Each token of a chunk, as a decode row over the keys that it sees."""
    told = Shape(shape.scalar, 64, 16, 3, 2, window=window, soft_cap=20.0)
    for tokens, keys in [(90, 600), (30, 30)]:
        rows = make_rows(np.random.default_rng(tokens), told, [(tokens, keys)])
        chunk = attend(told, rows)
        for token in range(0, tokens, 7):
            one = attend(told, rows.token_as_row(0, token))
            assert one.tobytes() == chunk[token : token + 1].tobytes(), f"token {token}"


@pytest.mark.parametrize("shape", [SMALL, EXACT], ids=["bf16", "float"])
def test_a_prompt_has_the_same_bits_however_it_is_cut(shape: Shape) -> None:
    rows = make_rows(np.random.default_rng(5), shape, [(200, 300)])
    whole = attend(shape, rows)
    for cuts in ([0, 64, 128, 200], [0, 1, 2, 99, 200], [0, 137, 200]):
        parts = [attend(shape, rows.chunk(0, first, end)) for first, end in pairwise(cuts)]
        assert np.concatenate(parts).tobytes() == whole.tobytes(), cuts


def test_the_order_of_threads_is_of_no_account() -> None:
    rows = make_rows(np.random.default_rng(6), SMALL, [(1, 600), (50, 130), (1, 3)])
    first = attend(SMALL, rows)
    assert all(attend(SMALL, rows, order=order).tobytes() == first.tobytes() for order in (1, 2, 9))


def test_undefined_behaviour_is_not_needed() -> None:
    rows = make_rows(np.random.default_rng(7), SMALL, [(1, 300), (20, 70)])
    assert attend(SMALL, rows, mode="ub").tobytes() == attend(SMALL, rows).tobytes()


def test_ranges_are_as_long_as_the_kernels_say() -> None:
    assert f"constexpr int kRangeKeys = {RANGE};" in (CUDA / "attention.cuh").read_text()
