"""The CPU kernels against torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastserve._core import cpu
from fastserve.kernels.cpu import CpuKernels, as_array, empty_kv

BLOCK_SIZES = (8, 16, 32)
ISAS = cpu.available_isas()


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(num_threads=2, isa=request.param)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Equal within ``tolerance`` of the larger of 1 and the wanted value."""
    got, want = got.double().flatten(1), want.double().flatten(1)
    bad = ~((got - want).abs() <= tolerance * want.abs().clamp_min(1.0))
    if bad.any():
        row, col = bad.nonzero()[0].tolist()
        raise AssertionError(f"[{row}, {col}]: got {got[row, col]}, want {want[row, col]}")


TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "cols"), [(0, 8), (1, 1), (3, 37), (5, 576)])
def test_rms_norm(kernels: CpuKernels, dtype: torch.dtype, rows: int, cols: int) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, rows, cols).to(dtype)
    weight = torch.randn(cols).to(dtype)
    total = (x.double() + residual.double()).to(dtype)
    for given, source in ((None, x), (residual.clone(), total)):
        wide = source.double()
        want = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
        got = kernels.rms_norm(x, weight, 1e-5, residual=given)
        assert got.dtype == dtype
        close(got, want, TOLERANCE[dtype])
        if given is not None:
            assert torch.equal(given, total)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "cols"), [(0, 8), (1, 1), (3, 37), (5, 1536)])
def test_silu_mul(kernels: CpuKernels, dtype: torch.dtype, rows: int, cols: int) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(rows, 2 * cols) * 20).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    close(kernels.silu_mul(gate_up), torch.nn.functional.silu(gate) * up, TOLERANCE[dtype])


class Paged:
    """A pool of blocks with NaN in every slot that no token owns."""

    def __init__(self, lens, block_size, heads, dim, kv_dtype, seed=0):
        rng = np.random.default_rng(seed)
        blocks = [-(-n // block_size) for n in lens]
        self.block_size = block_size
        self.kv = empty_kv(1, sum(blocks) + 3, block_size, heads, dim, kv_dtype)
        self.kv.fill_(torch.nan)
        ids = rng.permutation(sum(blocks) + 3).astype(np.int32)
        self.tables = np.full((len(lens) + 1, max([*blocks, 1]) + 1), 2**30, np.int32)
        for slot, count in enumerate(blocks):
            self.tables[slot, :count], ids = ids[:count], ids[count:]
        self.k = [torch.randn(n, heads, dim).to(kv_dtype) for n in lens]
        self.v = [torch.randn(n, heads, dim).to(kv_dtype) for n in lens]

    def write(self, kernels: CpuKernels) -> None:
        """Store every row's K and V (unrotated: an angle of zero)."""
        for slot, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            positions = np.arange(len(k), dtype=np.int32)
            block, offset = divmod(positions, self.block_size)
            slots = self.tables[slot][block] * self.block_size + offset
            angles = torch.cat([torch.ones(len(k), 1), torch.zeros(len(k), 1)], dim=1)
            q = torch.zeros_like(k)
            kernels.rope_and_write_kv(q, k, v, positions, slots, angles, self.kv[0])


def reference(q, k, v, scale, window, softcap):
    """Attention of the last ``len(q)`` tokens of a sequence, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    last = torch.arange(len(k) - len(q), len(k))[:, None]
    key = torch.arange(len(k))[None]
    hidden = (key > last) | ((key <= last - window) if window else False)
    weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "window", "softcap"),
    [
        (64, 9, 3, 0, 0.0),
        (32, 4, 4, 50, 0.0),
        (80, 8, 2, 0, 30.0),
        (96, 2, 1, 300, 0.0),
        (128, 14, 2, 1, 0.0),
        (256, 4, 1, 7, 50.0),
        (24, 3, 3, 0, 0.0),
        (8, 10, 1, 0, 0.0),
    ],
)
def test_paged_attention(
    kernels, block_size, dtype, kv_dtype, dim, heads, kv_heads, window, softcap
) -> None:
    torch.manual_seed(dim)
    lens, queries = [1, 40, 300, 17, 700, 64], [1, 40, 25, 0, 1, 3]
    paged = Paged(lens, block_size, kv_heads, dim, kv_dtype)
    paged.write(kernels)
    order = [4, 2, 0, 1, 3, 5]
    q = torch.randn(sum(queries) + 2, heads, dim).to(dtype)
    counts = [queries[i] for i in order]
    indptr = np.cumsum([0, *counts, 2]).astype(np.int32)
    seq_lens = np.array([lens[i] for i in order] + [0], np.int32)
    slots = np.array([*order, len(lens)], np.int32)
    out = torch.full_like(q, torch.nan)
    kernels.paged_attention(
        q, paged.kv[0], paged.tables, slots, indptr, seq_lens,
        scale=dim**-0.5, window=window, softcap=softcap, out=out,
    )  # fmt: skip
    assert torch.equal(out[-2:], torch.zeros_like(out[-2:])), "padding rows are zero"
    for i, row in enumerate(order):
        part = slice(indptr[i], indptr[i + 1])
        want = reference(q[part], paged.k[row], paged.v[row], dim**-0.5, window, softcap)
        close(out[part], want, TOLERANCE[dtype] * (1 if dtype == torch.bfloat16 else 2))
    assert as_array(out).dtype == (np.uint16 if dtype == torch.bfloat16 else np.float32)
