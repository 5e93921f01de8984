"""Paged attention on the GPU's kernels, run by the emulator, against float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_attention import (
    RANGE,
    How,
    Rows,
    Shape,
    attend,
    chunk,
    decode,
    make_rows,
    reference,
)
from cuda_launch import CUDA
from cuda_numbers import ROUNDING, loaded, poisoned, stored
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
    """Within what rounding of weights, their sum and results costs, and float32's arithmetic.

    Scores are exponents, so an error of theirs grows with them, and they with `spread`.
    """
    want, magnitude = reference(shape, rows)
    rounding = ROUNDING[shape.scalar]
    bound = rounding * (2.01 * magnitude + abs(want)) + 2e-6 * spread * magnitude
    error = abs(loaded(got, shape.scalar) - want)
    assert (np.isnan(error) == np.isnan(want)).all()
    assert np.nanmax(error / bound, initial=0.0) <= 1.0


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
        assert_close(told, rows, attend(told, rows, How(order=order, guard=guard)))

    run()


@pytest.mark.parametrize("shape", [SMALL, EXACT], ids=["bf16", "float"])
@pytest.mark.parametrize("keys", [1, 16, 64, 65, 256, 257, 600, 1024])
def test_long_rows(shape: Shape, keys: int) -> None:
    rows = make_rows(np.random.default_rng(keys), shape, [(1, keys), (min(keys, 40), keys)])
    assert_close(shape, rows, attend(shape, rows, How(extra_ranges=2)))


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
    together = attend(told, rows, How(order=1, guard="start"))
    for row, (_, keys) in enumerate(sizes):
        if keys:
            first, end = rows.query_indptr[row : row + 2].tolist()
            alone = attend(told, rows.only(row), How(extra_ranges=row % 2, order=row))
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


@pytest.mark.parametrize("shape", [SMALL, EXACT], ids=["bf16", "float"])
def test_each_kernel_leaves_the_other_rows_alone(shape: Shape) -> None:
    sizes = [(1, 300), (20, 90), (0, 0), (1, 17), (1, 0)]
    rows = make_rows(np.random.default_rng(8), shape, sizes)
    by_decode, by_chunk = (poisoned(rows.q.shape, shape.scalar) for _ in range(2))
    decode(shape, rows, by_decode, How())
    chunk(shape, rows, by_chunk, How())
    is_decode = np.repeat([tokens == 1 and keys > 0 for tokens, keys in sizes], [1, 20, 0, 1, 1])
    is_chunk = np.repeat([tokens > 1 for tokens, _ in sizes], [1, 20, 0, 1, 1])
    for got, is_own in ((by_decode, is_decode), (by_chunk, is_chunk)):
        assert (np.isnan(loaded(got, shape.scalar)).all((1, 2)) == ~is_own).all()


@pytest.mark.parametrize("scalar", ["__half", "__nv_bfloat16"])
def test_sums_are_those_of_rounded_weights(scalar: str) -> None:
    """A range of two keys has the weights 1 and w, and w is a number of the type."""
    shape = Shape(scalar, 64, 16, group=4)
    rows = make_rows(np.random.default_rng(9), shape, [(1, 258)])
    partials = decode(shape, rows, poisoned(rows.q.shape, scalar), How())
    weights = partials["partial_weights"][0, :, 1, 1] - np.float32(1.0)
    assert ((weights > 0.0) & (weights < 1.0)).all()
    assert (loaded(stored(weights, scalar), scalar) == weights).all()


@pytest.mark.parametrize("shape", [SMALL, EXACT], ids=["bf16", "float"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_keys_before_a_window_are_not_read(shape: Shape, tokens: int) -> None:
    """Their blocks may be gone, and those that are left hold anything."""
    told = Shape(shape.scalar, 64, 16, 3, 2, window=20)
    whole = make_rows(np.random.default_rng(10), told, [(tokens, 650)])
    want = attend(told, whole)
    first = 650 - tokens - 19
    tables, k_cache, v_cache = (
        array.copy() for array in (whole.block_tables, whole.k_cache, whole.v_cache)
    )
    slot = whole.row_slots[0]
    for cache in (k_cache, v_cache):
        cache[tables[slot, first // 16], :, : first % 16] = poisoned((1,), shape.scalar)
    tables[slot, : first // 16] = -1
    rows = replace(whole, block_tables=tables, k_cache=k_cache, v_cache=v_cache)
    assert attend(told, rows).tobytes() == want.tobytes()


@pytest.mark.parametrize("shape", [SMALL, EXACT], ids=["bf16", "float"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("key", [0, 63, 64, 255, 256, 599])
@pytest.mark.parametrize("what", ["key", "value"])
def test_nan_is_not_lost(shape: Shape, tokens: int, key: int, what: str) -> None:
    """Wherever it lies, and whatever larger scores come after it."""
    whole = make_rows(np.random.default_rng(11), shape, [(tokens, 602)], spread=1000.0)
    caches = {"key": whole.k_cache.copy(), "value": whole.v_cache.copy()}
    caches[what][whole.block_tables[whole.row_slots[0], key // 16], :, key % 16] = poisoned(
        (1,), shape.scalar
    )
    rows = replace(whole, k_cache=caches["key"], v_cache=caches["value"])
    assert np.isnan(loaded(attend(shape, rows), shape.scalar)).all()


def test_a_unit_of_nothing_but_nan_is_not_skipped() -> None:
    whole = make_rows(np.random.default_rng(12), SMALL, [(1, 65), (2, 66)])
    k_cache = whole.k_cache.copy()
    for slot in whole.row_slots:
        k_cache[whole.block_tables[slot, 4], :, :2] = poisoned((1,), SMALL.scalar)
    got = loaded(attend(SMALL, replace(whole, k_cache=k_cache)), SMALL.scalar)
    assert np.isnan(got).all()


def test_heads_of_256_alone_are_too_large_for_small_devices() -> None:
    """What the kernels' contracts say of shared memory: 99, 163 and 227 KiB a block."""
    taken = {
        (kernel, shape.scalar == "float", shape.head_dim): shape.shared_bytes(kernel)
        for shape in COVER
        for kernel in ("paged_decode", "paged_chunk")
    }
    too_large = {
        limit: {cell for cell, num_bytes in taken.items() if num_bytes > limit << 10}
        for limit in (99, 163, 227)
    }
    assert too_large[99] == {
        ("paged_chunk", False, 256),
        ("paged_chunk", True, 256),
        ("paged_decode", True, 256),
    }
    assert too_large[163] == {("paged_chunk", True, 256)}
    assert too_large[227] == set()


def test_the_order_of_threads_is_of_no_account() -> None:
    rows = make_rows(np.random.default_rng(6), SMALL, [(1, 600), (50, 130), (1, 3)])
    first = attend(SMALL, rows)
    assert all(
        attend(SMALL, rows, How(order=order)).tobytes() == first.tobytes() for order in (1, 2, 9)
    )


def test_undefined_behaviour_is_not_needed() -> None:
    rows = make_rows(np.random.default_rng(7), SMALL, [(1, 300), (20, 70)])
    assert attend(SMALL, rows, How(mode="ub")).tobytes() == attend(SMALL, rows).tobytes()


def test_ranges_are_as_long_as_the_kernels_say() -> None:
    assert f"constexpr int kRangeKeys = {RANGE};" in (CUDA / "attention.cuh").read_text()
