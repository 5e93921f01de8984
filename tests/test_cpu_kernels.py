"""The CPU kernels against torch in float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from fastserve._core import cpu
from fastserve.kernels.pool import make_pool
from fastserve.models.memory import KvDType, empty_kv
from torch_kernels import CpuKernels, as_array

BLOCK_SIZES = (8, 16, 32)
ISAS = cpu.available_isas()


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(make_pool(2, request.param))


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


def kv_tensor(num_blocks, block_size, heads, dim, dtype) -> torch.Tensor:
    """KV of one layer as torch knows it, all bits set: NaN, or numbers with a scale of NaN."""
    stored = KvDType(str(dtype).removeprefix("torch."))
    kv = empty_kv(1, num_blocks, block_size, heads, dim, stored)
    kv.view(np.uint8).fill(255)
    return torch.from_numpy(kv).view(dtype)


def as_stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What becomes of keys or values in a cache of that type."""
    if dtype != torch.int8:
        return x.to(dtype)
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).round().double() * scale.double()


class Paged:
    """A pool of blocks with NaN in every slot that no token owns."""

    def __init__(self, lens, block_size, heads, dim, kv_dtype, seed=0):
        rng = np.random.default_rng(seed)
        blocks = [-(-n // block_size) for n in lens]
        self.block_size = block_size
        self.kv = kv_tensor(sum(blocks) + 3, block_size, heads, dim, kv_dtype)
        ids = rng.permutation(sum(blocks) + 3).astype(np.int32)
        self.tables = np.full((len(lens) + 1, max([*blocks, 1]) + 1), 2**30, np.int32)
        for slot, count in enumerate(blocks):
            self.tables[slot, :count], ids = ids[:count], ids[count:]
        given = torch.float32 if kv_dtype == torch.int8 else kv_dtype
        self.given_k = [torch.randn(n, heads, dim).to(given) for n in lens]
        self.given_v = [torch.randn(n, heads, dim).to(given) for n in lens]
        self.k = [as_stored(k, kv_dtype) for k in self.given_k]
        self.v = [as_stored(v, kv_dtype) for v in self.given_v]

    def write(self, kernels: CpuKernels) -> None:
        """Store every row's K and V (unrotated: an angle of zero)."""
        for slot, (k, v) in enumerate(zip(self.given_k, self.given_v, strict=True)):
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
        (torch.float32, torch.int8),
        (torch.bfloat16, torch.int8),
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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 32)])
def test_rope_over_columns_of_a_fused_projection(
    kernels: CpuKernels, dtype: torch.dtype, with_norms: bool, dim: int, rotary: int
) -> None:
    torch.manual_seed(0)
    tokens, heads, kv_heads = 21, 4, 2
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    parts = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in parts)
    before = qkv.clone()
    angles = torch.rand(100, rotary // 2, dtype=torch.float64) * 100
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).float()
    positions = np.random.default_rng(0).integers(0, 100, tokens).astype(np.int32)
    slots = np.arange(tokens, dtype=np.int32) + 5
    weights = (torch.randn(dim), torch.randn(dim)) if with_norms else (None, None)
    kv = kv_tensor(2, 16, kv_heads, dim, torch.float32)
    kernels.rope_and_write_kv(
        q, k, v, positions, slots, cos_sin, kv[0],
        q_norm=weights[0], k_norm=weights[1], norm_eps=1e-6,
    )  # fmt: skip

    def rotated(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = x.double()
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        cos, sin = (t[:, None] for t in cos_sin[positions].double().chunk(2, dim=1))
        a, b, rest = x.split([rotary // 2, rotary // 2, dim - rotary], dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    width = heads * dim
    close(q, rotated(before[:, :width].unflatten(1, (-1, dim)), weights[0]), TOLERANCE[dtype] * 4)
    assert torch.equal(qkv[:, width:], before[:, width:]), "k and v are left as they are"
    # What was stored shows in attention: the keys decide how the values are mixed.
    want_k = rotated(before[:, width : width + kv_heads * dim].unflatten(1, (-1, dim)), weights[1])
    values = before[:, width + kv_heads * dim :].unflatten(1, (-1, dim))
    probe = torch.randn(1, heads, dim)
    got = kernels.paged_attention(
        probe,
        kv[0],
        np.array([[0, 1]], np.int32),
        np.zeros(1, np.int32),
        np.array([0, 1], np.int32),
        np.array([5 + tokens], np.int32),
        scale=0.2,
        window=tokens,
    )
    close(got, reference(probe, want_k, values, 0.2, 0, 0.0), 2e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_bits_do_not_depend_on_company(isa: str) -> None:
    kernels = CpuKernels(make_pool(2, isa))
    torch.manual_seed(3)
    paged = Paged([600, 40, 333], 16, 3, 64, torch.bfloat16)
    paged.write(kernels)
    q = torch.randn(600, 9, 64)

    def attend(pool: CpuKernels, *rows: tuple[int, int, int]) -> torch.Tensor:
        """Rows are (slot, first token, end token)."""
        counts = [end - first for _, first, end in rows]
        return pool.paged_attention(
            torch.cat([q[first:end] for _, first, end in rows]),
            paged.kv[0],
            paged.tables,
            np.array([slot for slot, _, _ in rows], np.int32),
            np.cumsum([0, *counts]).astype(np.int32),
            np.array([end for _, _, end in rows], np.int32),
            scale=0.125,
        )

    whole = attend(kernels, (0, 0, 600))
    one_thread = CpuKernels(make_pool(1, isa))
    for token in (0, 1, 255, 256, 400, 599):
        assert torch.equal(attend(one_thread, (0, token, token + 1))[0], whole[token]), token
    for chunk in (7, 64, 256):
        for first in range(0, 600, chunk):
            end = min(600, first + chunk)
            batch = attend(kernels, (1, 3, 40), (0, first, end), (2, 332, 333))
            assert torch.equal(batch[37:-1], whole[first:end]), (chunk, first)


def arguments(**changes: object) -> dict[str, object]:
    """A call of ``Pool.paged_attention`` that is right but for ``changes``."""
    good: dict[str, object] = {
        "q": np.zeros((3, 4, 8), np.float32),
        "kv_layer": np.zeros(cpu.kv_layer_shape(4, 8, 2, 8, "float32"), np.float32),
        "block_tables": np.array([[0, 1], [3, 2]], np.int32),
        "row_slots": np.array([1, 0], np.int32),
        "query_indptr": np.array([0, 1, 3], np.int32),
        "seq_lens": np.array([9, 16], np.int32),
        "out": np.zeros((3, 4, 8), np.float32),
        "scale": 1.0,
    }
    return good | changes


def read_only() -> np.ndarray:
    array = np.zeros((3, 4, 8), np.float32)
    array.flags.writeable = False
    return array


SHARED = np.zeros((3, 4, 8), np.float32)

WRONG = [
    (ValueError, "block_tables: got block 4 at [1, 0], want 0 to 4 (blocks of the pool) exclusive",
     {"block_tables": np.array([[0, 1], [4, 2]], np.int32)}),
    (ValueError, "row_slots: got 2 at 0, want 0 to 2 (rows of block_tables) exclusive",
     {"row_slots": np.array([2, 0], np.int32)}),
    (ValueError, "query_indptr: got 3 words from Some(0) to Some(2), want 3 ascending words from 0",
     {"query_indptr": np.array([0, 1, 2], np.int32)}),
    (ValueError, "seq_lens: got 17 at 0, which has 1 query tokens, want 0, or 1 to 16",
     {"seq_lens": np.array([17, 16], np.int32)}),
    (ValueError, "q: got shape [3, 32] strides [128, 4] float32, want [tokens, heads, head_dim]",
     {"q": np.zeros((3, 32), np.float32)}),
    (ValueError, "q: got shape [3, 4, 8] strides [256, 64, 8]",
     {"q": np.zeros((3, 4, 16), np.float32)[:, :, ::2]}),
    (ValueError, "q: got [3, 24] float32, want [tokens, a multiple of 2 kv heads * 8]",
     {"q": np.zeros((3, 3, 8), np.float32)}),
    (ValueError, "kv_layer: got shape [4, 2, 64]", {"kv_layer": np.zeros((4, 2, 64), np.float32)}),
    (ValueError, "kv_layer: got shape [4, 2, 2, 64] strides [256, 128, 64, 1] int8, want "
     "C-contiguous [blocks, kv heads, 2, block_size * 12]",
     {"kv_layer": np.zeros((4, 2, 2, 64), np.int8)}),
    (ValueError, "kv_layer: got shape [4, 2, 2, 96] strides [384, 192, 96, 1] int8, want an array "
     "aligned to 4 bytes", {"kv_layer": np.zeros(1537, np.int8)[1:].reshape(4, 2, 2, 96)}),
    (TypeError, "kv_layer: got float64, want float32, uint16 (bfloat16) or int8",
     {"kv_layer": np.zeros((4, 2, 2, 64))}),
    (ValueError, "out and kv_layer: want memory of their own",
     {"out": SHARED, "kv_layer": SHARED.view(np.int8).reshape(1, 2, 2, 96)}),
    (ValueError, "block_size: got 7, want 8 or a multiple of 16",
     {"kv_layer": np.zeros((4, 2, 2, 56), np.float32)}),
    (ValueError, "head_dim: got 12, want a multiple of 8, at most 256",
     {"q": np.zeros((3, 4, 12), np.float32), "kv_layer": np.zeros((4, 2, 2, 96), np.float32)}),
    (TypeError, "seq_lens: got int64, want int32", {"seq_lens": np.array([9, 16])}),
    (TypeError, "q: got float64, want float32 or uint16 (bfloat16)", {"q": np.zeros((3, 4, 8))}),
    (TypeError, "q: got <class 'list'>, want a numpy array", {"q": [1.0]}),
    (ValueError, "out: got [3, 32] bfloat16 (as uint16), want [3, 32] float32",
     {"out": np.zeros((3, 4, 8), np.uint16)}),
    (ValueError, "out: got shape [3, 4, 8] strides [128, 32, 4] float32, want a writable array",
     {"out": read_only()}),
    (ValueError, "out and q: want memory of their own", {"q": SHARED, "out": SHARED[:, :, :]}),
    (ValueError, "scale: got inf, want a finite number", {"scale": np.inf}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "text", "changes"), WRONG, ids=[text[:40] for _, text, _ in WRONG]
)
def test_a_wrong_argument_is_named(error, text, changes) -> None:
    pool = cpu.Pool(1)
    pool.paged_attention(**arguments())
    with pytest.raises(error) as caught:
        pool.paged_attention(**arguments(**changes))
    assert str(caught.value).startswith(text)


def test_a_wrong_pool_is_refused() -> None:
    with pytest.raises(ValueError, match=r'isa: got "mmx", this machine has portable'):
        cpu.Pool(1, "mmx")
    with pytest.raises(ValueError, match=r"num_threads: got 0, want 1 to 1024"):
        cpu.Pool(0)
    with pytest.raises(ValueError, match=r"block_size: got 12"):
        cpu.kv_shape(1, 1, 12, 1, 8, "float32")
    with pytest.raises(ValueError, match=r'dtype: got "int4", want one of float32, bfloat16, int8'):
        cpu.kv_shape(1, 1, 16, 1, 8, "int4")


def test_the_instruction_set_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTSERVE_CPU_ISA", "portable")
    assert make_pool(1).isa == "portable"
    assert make_pool(1, cpu.detect_isa()).isa == cpu.detect_isa(), "an argument goes first"
    monkeypatch.delenv("FASTSERVE_CPU_ISA")
    assert make_pool(1).isa == cpu.detect_isa() == ISAS[-1]
    assert ISAS[0] == "portable"


def test_threads_may_share_a_pool() -> None:
    kernels = CpuKernels(make_pool(2))
    x, weight = torch.randn(256, 576), torch.ones(576)
    want = kernels.rms_norm(x, weight, 1e-5)

    def work(_: int) -> bool:
        return all(torch.equal(kernels.rms_norm(x, weight, 1e-5), want) for _ in range(50))

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(work, range(4)))
