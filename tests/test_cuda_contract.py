"""Arguments of kernels are held to the list at the head of the file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastserve.errors import KernelError
from fastserve.kernels.contract import Contract, Parameter

CUDA = Path(__file__).resolve().parent.parent / "cuda"
MACROS = {"SCALAR": "__half", "HEAD_DIM": "64", "BLOCK_SIZE": "16"}
ROPE = Contract.read(CUDA / "rope_write_kv.cu")


def arguments(**changed: Any) -> dict[str, Any]:
    """3 tokens, 4 heads, 2 KV heads, 5 blocks."""
    given: dict[str, Any] = {
        "qkv": np.zeros((3, 8, 64), np.float16),
        "k_cache": np.zeros((5, 2, 16, 64), np.float16),
        "v_cache": np.zeros((5, 2, 16, 64), np.float16),
        "positions": np.zeros(3, np.int32),
        "slot_mapping": np.zeros(3, np.int32),
        "cos_sin": np.zeros((100, 64), np.float32),
        "q_norm": None,
        "k_norm": None,
        "num_heads": 4,
        "num_kv_heads": 2,
        "rotary_dim": 64,
        "eps": 1e-5,
    }
    return given | changed


def test_every_file_has_a_contract() -> None:
    for path in CUDA.glob("*.cu"):
        contract = Contract.read(path)
        assert contract.kernel == path.stem
        assert contract.parameters


def test_a_list_is_read() -> None:
    contract = Contract.read(CUDA / "gated.cu")
    assert contract.parameters == (
        Parameter("out", "SCALAR", ("num_tokens", "size"), ""),
        Parameter("x", "SCALAR", ("num_tokens", "2 * size"), "gate, then up"),
        Parameter("size", "i32", None, "a multiple of 16 / sizeof(SCALAR)"),
    )
    assert {p.name for p in ROPE.parameters if p.may_be_null} == {"q_norm", "k_norm"}


def test_arguments_come_back_in_order() -> None:
    given = arguments()
    shuffled = dict(sorted(given.items()))
    bound = ROPE.bind(MACROS, shuffled)
    assert [value is None or id(value) for value in bound[:8]] == [
        value is None or id(value) for value in list(given.values())[:8]
    ]
    assert bound[8:] == [np.int32(4), np.int32(2), np.int32(64), np.float32(1e-5)]
    assert [type(value) for value in bound[8:]] == [np.int32, np.int32, np.int32, np.float32]


def test_torch_tensors_are_taken() -> None:
    torch = pytest.importorskip("torch")
    contract = Contract.read(CUDA / "gated.cu")
    x = torch.zeros(3, 32, dtype=torch.bfloat16)
    given = {"out": torch.zeros(3, 16, dtype=torch.bfloat16), "x": x, "size": 16}
    macros = {"SCALAR": "__nv_bfloat16", "ACTIVATION": "SILU"}
    assert contract.bind(macros, given) == [given["out"], x, 16]
    with pytest.raises(KernelError, match="gated: x is not contiguous"):
        contract.bind(macros, given | {"x": torch.zeros(32, 3, dtype=torch.bfloat16).T})
    with pytest.raises(KernelError, match=r"gated: x is of float16: want bfloat16 or uint16"):
        contract.bind(macros, given | {"x": x.half()})


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"qkv": np.zeros((3, 8, 64), np.float32)}, "qkv is of float32: want float16"),
        ({"qkv": np.zeros((3, 7, 64), np.float16)}, "qkv has shape [3, 7, 64]: want [num_tokens, "),
        ({"qkv": np.zeros((3, 8, 32), np.float16)}, "qkv has shape [3, 8, 32]"),
        ({"qkv": np.zeros((3, 512), np.float16)}, "qkv has shape [3, 512]: want [num_tokens, "),
        ({"qkv": np.zeros((3, 64, 8), np.float16).swapaxes(1, 2)}, "qkv is not contiguous"),
        ({"qkv": np.zeros(1537, np.float16)[1:].reshape(3, 8, 64)}, "qkv starts 2 bytes past"),
        ({"qkv": None}, "qkv is None: want an array"),
        ({"qkv": 7}, "qkv is a int: want an array"),
        ({"positions": np.zeros(4, np.int32)}, "positions has shape [4]: want [num_tokens] with"),
        ({"positions": np.zeros(3, np.int64)}, "positions is of int64: want int32"),
        ({"k_cache": np.zeros((5, 2, 8, 64), np.float16)}, "k_cache has shape [5, 2, 8, 64]"),
        ({"v_cache": np.zeros((6, 2, 16, 64), np.float16)}, "v_cache has shape [6, 2, 16, 64]"),
        ({"cos_sin": np.zeros((100, 32), np.float32)}, "cos_sin has shape [100, 32]"),
        ({"q_norm": np.zeros(32, np.float16)}, "q_norm has shape [32]: want [HEAD_DIM] with"),
        ({"num_heads": 2**31}, "num_heads=2147483648: want an integer of 32 bits"),
        ({"num_heads": 4.5}, "num_heads=4.5: want an integer"),
        ({"num_heads": np.zeros(2)}, "num_heads=array([0., 0.]): want a number"),
        ({"num_heads": None}, "num_heads=None: want a number"),
        ({"num_heads": [8]}, "num_heads=[8]: want a number"),
        ({"num_heads": float("inf")}, "num_heads=inf: want a finite number"),
        ({"eps": float("nan")}, "eps=nan: want a finite number"),
        ({"eps": 1e300}, "eps=1e+300: want a finite number"),
        ({"eps": "1e-5"}, "eps='1e-5': want a number"),
        ({"qkv": np.float32(1)}, "qkv is a float32: want an array"),
        ({"rotary_dim": 63}, "rotary_dim=63: want 0 to HEAD_DIM, a multiple of 2"),
        ({"rotary_dim": 128}, "rotary_dim=128: want 0 to HEAD_DIM, a multiple of 2"),
        ({"rotary_dim": -2}, "rotary_dim=-2: want 0 to HEAD_DIM, a multiple of 2"),
        ({"scale": 1.0}, "scale: no argument of it"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(KernelError, match=f"rope_write_kv: {re.escape(says)}"):
        ROPE.bind(MACROS, arguments(**changed))


def test_a_missing_argument_is_named() -> None:
    given = arguments()
    del given["positions"], given["eps"]
    with pytest.raises(KernelError, match="rope_write_kv: positions, eps missing"):
        ROPE.bind(MACROS, given)


def test_sizes_that_are_reckoned_have_to_agree() -> None:
    contract = Contract.read(CUDA / "paged_merge.cu")
    rows = {"partial_out": (3, 4, 2, 64), "partial_weights": (3, 4, 2, 2)}
    given = {name: np.zeros(shape, np.float32) for name, shape in rows.items()}
    given |= {"out": np.zeros((9, 4, 64), np.float16), "max_ranges": 2, "window": 0}
    given |= {"query_indptr": np.zeros(4, np.int32), "seq_lens": np.zeros(3, np.int32)}
    contract.bind(MACROS, given)
    with pytest.raises(KernelError, match=r"query_indptr has shape \[5\]: want \[num_rows \+ 1\]"):
        contract.bind(MACROS, given | {"query_indptr": np.zeros(5, np.int32)})


@pytest.mark.parametrize(
    ("macros", "says"),
    [
        ({"SCALAR": "__half", "BLOCK_SIZE": "16"}, "compiled without HEAD_DIM"),
        ({"HEAD_DIM": "64", "BLOCK_SIZE": "16"}, "compiled without SCALAR"),
        (
            MACROS | {"SCALAR": "double"},
            "SCALAR is double: want one of float, __half, __nv_bfloat16",
        ),
    ],
)
def test_macros_are_those_of_the_kernel(macros: dict[str, str], says: str) -> None:
    with pytest.raises(KernelError, match=f"rope_write_kv: {says}"):
        ROPE.bind(macros, arguments())


def test_macros_may_be_numbers() -> None:
    ROPE.bind({"SCALAR": "__half", "HEAD_DIM": 64, "BLOCK_SIZE": 16}, arguments())


@pytest.mark.parametrize("group", [0, 1, 2, 4, 17, -1])
def test_groups_are_those_of_the_heads(group: int) -> None:
    """6 query heads and 2 KV heads."""
    caches = {name: np.zeros((9, 2, 16, 64), np.float16) for name in ("k_cache", "v_cache")}
    tokens = {name: np.zeros((5, 6, 64), np.float16) for name in ("out", "q")}
    rows = {"row_slots": np.zeros(3, np.int32), "seq_lens": np.zeros(3, np.int32)}
    rows |= {"query_indptr": np.zeros(4, np.int32), "block_tables": np.zeros((4, 7), np.int32)}
    numbers = {"max_blocks": 7, "window": 0, "scale": 1.0, "soft_cap": 0.0}
    given = {**caches, **tokens, **rows, **numbers}
    chunk = Contract.read(CUDA / "paged_chunk.cu")
    chunk.bind(MACROS, given | {"group": 3})
    with pytest.raises(KernelError, match=r"paged_chunk: (group=|out has shape)"):
        chunk.bind(MACROS, given | {"group": group})
    for name, value in (("window", -1), ("soft_cap", -0.5)):
        with pytest.raises(KernelError, match=f"paged_chunk: {name}={value}: want at least 0"):
            chunk.bind(MACROS, given | {"group": 3, name: value})


@pytest.mark.parametrize("size", [0, 5, 8])
def test_multiples_follow_the_type(size: int) -> None:
    gated = Contract.read(CUDA / "gated.cu")
    given = {"out": np.zeros((3, size), np.float16), "x": np.zeros((3, 2 * size), np.float16)}
    macros = {"SCALAR": "__half", "ACTIVATION": "SILU"}
    if size % 8 == 0:
        gated.bind(macros, given | {"size": size})
        return
    with pytest.raises(KernelError, match=r"size=5: want a multiple of 16 / sizeof\(SCALAR\)"):
        gated.bind(macros, given | {"size": size})


def test_vectors_of_any_type_are_counted_in_bytes() -> None:
    contract = Contract.read(CUDA / "copy_blocks.cu")
    copies = np.zeros((2, 2), np.int32)
    given = {"copies": copies, "num_blocks": 10, "block_vectors": 3}
    for cache in (np.zeros((6, 10, 12), np.int32), np.zeros((6, 10, 24), np.float16)):
        contract.bind({}, given | {"cache": cache})
    for cache in (np.zeros(3, np.int32), np.zeros((6, 10, 12), np.float16)[:, :9].copy()):
        with pytest.raises(KernelError, match=r"copy_blocks: cache has .* bytes: want"):
            contract.bind({}, given | {"cache": cache})


@pytest.mark.parametrize("head", ["", "// Arguments, in order:\n//   x  f64 [n]\n"])
def test_a_head_that_says_nothing_is_an_error(tmp_path: Path, head: str) -> None:
    source = tmp_path / "strange.cu"
    source.write_text(head)
    with pytest.raises(ValueError, match=r"strange\.cu"):
        Contract.read(source)
