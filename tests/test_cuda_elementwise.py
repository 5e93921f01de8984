"""The GPU's smaller kernels, run by the emulator, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from cuda_launch import kernel
from cuda_numbers import ROUNDING, SCALARS, loaded, poisoned, stored

ORDERS = (0, 1, 4)


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def assert_close(got: np.ndarray, want: np.ndarray, scalar: str) -> None:
    tolerance = ROUNDING[scalar] + 1e-6
    np.testing.assert_allclose(loaded(got, scalar), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("hidden", [8, 64, 2056, 4096])
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm(scalar: str, hidden: int, has_residual: bool) -> None:
    draw = random(hidden)
    x, residual, weight = (
        stored(draw.standard_normal(shape), scalar)
        for shape in ((3, hidden), (3, hidden), (hidden,))
    )
    for order in ORDERS:
        out, summed = poisoned((3, hidden), scalar), residual.copy()
        arguments = {"out": out, "residual": summed if has_residual else None, "x": x}
        arguments |= {"weight": weight, "hidden_size": hidden, "eps": 1e-5}
        kernel("rms_norm", SCALAR=scalar).launch(3, 256, arguments, order=order)
        h = loaded(x, scalar)
        if has_residual:
            want_sum = stored(h + loaded(residual, scalar), scalar)
            assert summed.tobytes() == want_sum.tobytes()
            h = loaded(want_sum, scalar)
        want = h / np.sqrt((h**2).mean(1, keepdims=True) + 1e-5) * loaded(weight, scalar)
        assert_close(out, want, scalar)


@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("activation", ["SILU", "GELU"])
@pytest.mark.parametrize("size", [8, 1032])
def test_gated(scalar: str, activation: str, size: int) -> None:
    x = stored(3 * random(size).standard_normal((4, 2 * size)), scalar)
    out = poisoned((4, size), scalar)
    kernel("gated", SCALAR=scalar, ACTIVATION=activation).launch(
        4, 256, {"out": out, "x": x, "size": size}
    )
    gate, up = loaded(x[:, :size], scalar), loaded(x[:, size:], scalar)
    if activation == "SILU":
        active = gate / (1 + np.exp(-gate))
    else:
        active = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    assert_close(out, active * up, scalar)


@pytest.mark.parametrize("scalar", SCALARS)
def test_embed(scalar: str) -> None:
    table = stored(random().standard_normal((50, 72)), scalar)
    ids, samples = np.array([0, 49, -1, 7, -3], np.int32), np.array([5, 6, 49], np.int32)
    out = poisoned((5, 72), scalar)
    arguments = {"out": out, "table": table, "token_ids": ids, "last_samples": samples}
    kernel("embed", SCALAR=scalar).launch(5, 128, arguments | {"hidden_size": 72})
    assert out.tobytes() == table[[0, 49, 5, 7, 49]].tobytes()


@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "block_size", "has_norms"),
    [(64, 64, 16, False), (80, 40, 8, True), (96, 96, 16, True), (128, 64, 32, False)],
)
def test_rope_write_kv(
    scalar: str, head_dim: int, rotary_dim: int, block_size: int, has_norms: bool
) -> None:
    draw, heads, kv_heads, tokens = random(head_dim), 4, 2, 5
    qkv = stored(draw.standard_normal((tokens, heads + 2 * kv_heads, head_dim)), scalar)
    positions = np.array([0, 3, 900, 7, 1], np.int32)
    slots = np.array([5, block_size * 2, -1, 0, block_size * 3 + block_size - 1], np.int32)
    angles = np.outer(np.arange(1000), 0.9 ** np.arange(rotary_dim // 2))
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    norm = stored(draw.standard_normal(head_dim), scalar) if has_norms else None
    plane = (4, kv_heads, block_size, head_dim)
    k_cache, v_cache, got = poisoned(plane, scalar), poisoned(plane, scalar), qkv.copy()
    arguments = {
        "qkv": got,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "positions": positions,
        "slot_mapping": slots,
        "cos_sin": cos_sin,
        "q_norm": norm,
        "k_norm": norm,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "rotary_dim": rotary_dim,
        "eps": 1e-6,
    }
    kernel("rope_write_kv", SCALAR=scalar, HEAD_DIM=head_dim, BLOCK_SIZE=block_size).launch(
        (tokens, heads + 2 * kv_heads), 32, arguments
    )

    want = loaded(qkv, scalar)
    q_and_k = want[:, : heads + kv_heads]
    if has_norms:
        scale = 1 / np.sqrt((q_and_k**2).mean(2, keepdims=True) + 1e-6)
        q_and_k[:] = q_and_k * scale * loaded(norm, scalar)
    half = rotary_dim // 2
    cos, sin = (
        part[positions][:, None].astype(np.float64)
        for part in (cos_sin[:, :half], cos_sin[:, half:])
    )
    first, second = q_and_k[..., :half].copy(), q_and_k[..., half:rotary_dim].copy()
    q_and_k[..., :half] = first * cos - second * sin
    q_and_k[..., half:rotary_dim] = second * cos + first * sin

    assert_close(got[:, :heads], want[:, :heads], scalar)
    assert got[:, heads:].tobytes() == qkv[:, heads:].tobytes()
    for cache_, first_head in ((k_cache, heads), (v_cache, heads + kv_heads)):
        expected = np.full(plane, np.nan)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                of_token = want[token, first_head : first_head + kv_heads]
                expected[slot // block_size, :, slot % block_size] = of_token
        assert_close(cache_, expected, scalar)


def test_copy_blocks() -> None:
    cache_ = random().integers(0, 2**31, (6, 10, 24), dtype=np.int32)
    want = cache_.copy()
    copies = np.array([[3, 0], [9, 4]], np.int32)
    for source, into in copies:
        want[:, into] = want[:, source]
    arguments = {"cache": cache_, "copies": copies, "num_blocks": 10, "block_vectors": 24 // 4}
    kernel("copy_blocks").launch((2, 6), 256, arguments)
    assert (cache_ == want).all()


def test_the_last_edit_of_a_place_holds() -> None:
    tables = np.full((600, 7), -1, np.int32)
    edits = random().integers(0, 6, (900, 3), dtype=np.int32)
    edits[:, 0] = random(1).choice([0, 1, 256, 512, 599], 900)
    want = tables.copy()
    for slot, index, block in edits:
        want[slot, index] = block
    for order in ORDERS:
        got = tables.copy()
        arguments = {"block_tables": got, "edits": edits, "num_edits": 900, "max_blocks": 7}
        kernel("apply_edits").launch(1, 256, arguments, order=order)
        assert (got == want).all()
