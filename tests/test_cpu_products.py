"""Products with packed weights through the binding, against float64.

Formats and bits are tested in ``rust/cpu/tests/product.rs``; here it is arrays and errors.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from fastserve._core import cpu
from fastserve.models.tensors import find_format

RNG = np.random.default_rng(5)


def packed(name: str, rows: int, cols: int) -> tuple[cpu.Packed, np.ndarray]:
    """Random rows in a format, and what the ``gguf`` package says that they are."""
    numbers = RNG.standard_normal((rows, cols), dtype=np.float32)
    layout = find_format(name)
    assert layout is not None
    kind = gguf.GGMLQuantizationType[name]
    if name in ("Q4_K", "Q6_K"):  # The package reads these and does not write them.
        num_blocks = rows * cols // layout.block_elements
        raw = RNG.integers(0, 60, (num_blocks, layout.block_bytes), dtype=np.uint8)
    else:
        raw = gguf.quantize(numbers, kind)
    part = cpu.Packed(name, rows, cols)
    part.fill(0, np.ascontiguousarray(raw).reshape(-1).view(np.uint8))
    return part, gguf.dequantize(raw.reshape(-1), kind).reshape(rows, cols)


@pytest.mark.parametrize("isa", cpu.available_isas())
@pytest.mark.parametrize("name", cpu.weight_formats())
def test_products_and_rows(name: str, isa: str) -> None:
    pool = cpu.Pool(2, isa)
    parts = [packed(name, 40, 512), packed("Q8_0", 3, 512)]
    numbers = np.concatenate([part[1] for part in parts])
    weight = cpu.Weight([part[0] for part in parts])
    assert weight.shape == numbers.shape
    assert weight.formats == [name, "Q8_0"]
    bias = RNG.standard_normal(43, dtype=np.float32)
    for rows in (1, 3, 17):
        # Columns of a wider array: only the columns need to be contiguous.
        x = RNG.standard_normal((rows, 600), dtype=np.float32)[:, 7:519]
        out = np.full((rows, 50), np.nan, np.float32)[:, :43]
        pool.linear(x, weight, out, bias)
        want = x.astype(np.float64) @ numbers.T.astype(np.float64) + bias
        size = np.abs(x).astype(np.float64) @ np.abs(numbers).T.astype(np.float64) + np.abs(bias)
        assert (np.abs(out - want) <= 140 * 6e-8 * size).all()
    got = np.empty((4, 512), np.float32)
    pool.gather(weight, np.array([42, 0, 39, 42], np.int32), got)
    np.testing.assert_array_equal(got, numbers[[42, 0, 39, 42]])


def test_bfloat16_is_rounded_once() -> None:
    part, numbers = packed("BF16", 20, 64)
    x = torch.randn(3, 64).to(torch.bfloat16)
    out = np.empty((3, 20), np.uint16)
    cpu.Pool(1).linear(x.view(torch.uint16).numpy(), cpu.Weight([part]), out)
    want = x.double() @ torch.from_numpy(numbers).double().T
    got = torch.from_numpy(out).view(torch.bfloat16).double()
    assert ((got - want).abs() <= 0.5 * 2**-7 * want.abs() * 1.001 + 1e-5).all()


def test_decode_takes_any_bytes_and_names_what_is_wrong() -> None:
    """Numbers are compared in ``test_weights_gguf.py``."""
    numbers = RNG.standard_normal(192, dtype=np.float32)
    stored, out = numbers.view(np.uint8), np.zeros(192, np.float32)
    kept = np.zeros(192, np.float32)
    kept.flags.writeable = False
    cases = [
        (ValueError, 'format: got "Q3_K"', "Q3_K", stored, out),
        (ValueError, "blocks: got 767 bytes, want 768", "F32", stored[1:], out),
        (ValueError, "blocks: got an array with gaps", "F32", stored[::2], out),
        (ValueError, "out: got 33 numbers, want a multiple of 32", "Q8_0", stored, out[:33]),
        (ValueError, "out: got .*, want a C-contiguous array", "F32", stored, out[::2]),
        (ValueError, "out: got .*, want a writable array", "F32", stored, kept),
        (TypeError, "out: got float64", "F32", stored, out.astype(np.float64)),
        (ValueError, "memory of their own", "F32", out.view(np.uint8)[:-4], out[1:]),
    ]
    for error, text, name, raw, into in cases:
        with pytest.raises(error, match=text):
            cpu.decode(name, raw, into)
        assert not out.any()
    odd = np.zeros(769, np.uint8)[1:]
    odd[:] = stored
    for raw, into in ((stored[:0], out[:0]), (odd, out), (stored, out.reshape(3, 64))):
        out[:] = 0
        cpu.decode("F32", raw, into)
        np.testing.assert_array_equal(into.reshape(-1), numbers[: into.size])
    cpu.decode("F32", out.view(np.uint8)[:384], out[96:])
    np.testing.assert_array_equal(out[96:], numbers[:96])


def test_wrong_arguments_are_named() -> None:
    pool = cpu.Pool(1)
    part, _ = packed("F32", 5, 8)
    weight = cpu.Weight([part])
    x, out = np.zeros((2, 8), np.float32), np.zeros((2, 5), np.float32)
    cases = [
        (ValueError, 'format: got "Q3_K"', lambda: cpu.Packed("Q3_K", 1, 256)),
        (ValueError, "num_cols: got 8, want a multiple of 32", lambda: cpu.Packed("Q8_0", 1, 8)),
        (
            ValueError,
            "rows: got 4 bytes",
            lambda: packed("F32", 1, 8)[0].fill(0, x[0, :1].view("u1")),
        ),
        (
            ValueError,
            "rows: got an array with gaps",
            lambda: packed("F32", 1, 8)[0].fill(0, x.view("u1")[0, ::2]),
        ),
        (ValueError, "part of a Weight already", lambda: part.fill(0, x[0].view("u1"))),
        (ValueError, "part of a Weight already", lambda: cpu.Weight([part])),
        (ValueError, "parts: got 0", lambda: cpu.Weight([])),
        (ValueError, "x: got", lambda: pool.linear(x[:, :7], weight, out)),
        (ValueError, "out: got", lambda: pool.linear(x, weight, out[:, :4])),
        (ValueError, "bias: got", lambda: pool.linear(x, weight, out, x[0])),
        (TypeError, "x: got float64", lambda: pool.linear(x.astype("f8"), weight, out)),
        (ValueError, "memory of their own", lambda: pool.linear(x, weight, x[:, :5])),
        (ValueError, "rows: got 5", lambda: pool.gather(weight, np.array([0, 5], np.int32), x)),
        (ValueError, "rows: got -1", lambda: pool.gather(weight, np.array([0, -1], np.int32), x)),
    ]
    for error, text, call in cases:
        with pytest.raises(error, match=text):
            call()
    twice, _ = packed("F32", 1, 8)
    with pytest.raises(ValueError, match="part of a Weight already"):
        cpu.Weight([twice, twice])
    pool.linear(x, weight, out)
    assert not out.any(), "the next call works"
