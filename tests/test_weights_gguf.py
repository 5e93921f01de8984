"""GGUF files: the header against the ``gguf`` package, numbers against its dequantiser."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

import gguf_factory
import model_factory
import packed_rows
from fastserve._core import cpu
from fastserve.errors import ModelError
from fastserve.kernels.pool import ISA_VARIABLE
from fastserve.models.checkpoint import Checkpoint
from fastserve.models.dequant import FORMATS, decode
from fastserve.models.gguf_config import config_from_gguf
from fastserve.models.gguf_file import read_gguf
from fastserve.models.resolve import resolve
from fastserve.models.tensors import COMMON_FORMATS, DType, find_format
from fastserve.models.weights import Packing, load_weights
from fastserve.runner import CpuRunner
from plans import PlanBuilder, drive

# Rows of 256 numbers, so that every format fits.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A Llama whose every matrix has rows of 256 numbers."""
    return model_factory.make("llama", tmp_path_factory.mktemp("wide"), **WIDE)


@pytest.fixture(scope="session")
def file(folder, tmp_path_factory) -> Path:
    return gguf_factory.convert(folder, tmp_path_factory.mktemp("gguf") / "model.gguf", "Q4_1")


def as_floats(array: np.ndarray) -> np.ndarray:
    """float32 of what may be bfloat16."""
    if array.dtype == np.float32:
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


# Where a block has its float16: scales and minima.
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}
# Zeros, subnormal, smallest normal, largest, infinite, NaN.
ODD_HALVES = [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7C01, 0xFE00]
# The same in float32; and halfway between two bfloat16, to either side.
ODD_FLOATS = [0, 1 << 31, 1, 0x7F_FFFF, 0x80_0000, 0x7F7F_FFFF, 0xFF7F_FFFF, 0x7F80_0000]
ODD_FLOATS += [0xFF80_0000, 0x7F80_0001, 0xFFFF_FFFF, 0x3F80_8000, 0x3F81_8000, 0x3F80_8001]


def blocks(name: str, num_blocks: int = 300) -> np.ndarray:
    """Any bits at all are a block: all there are of two bytes, or random ones and odd ones."""
    found = find_format(name)
    assert found is not None
    if found.block_bytes == 2:
        return np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2)
    rng = np.random.default_rng(len(name))
    random = rng.integers(0, 256, (num_blocks, found.block_bytes), dtype=np.uint8)
    if name == "F32":
        return np.concatenate([random, np.array(ODD_FLOATS, "<u4").view(np.uint8).reshape(-1, 4)])
    added = []
    for number in (0x00, 0x7F, 0x80, 0xFF):
        for odd in ODD_HALVES:
            block = np.full(found.block_bytes, number, np.uint8)
            for at, half in zip(HALVES.get(name, []), (odd, 0x3C00), strict=False):
                block[at : at + 2] = np.array([half], "<u2").view(np.uint8)
            added.append(block)
    return np.concatenate([random, added])


def test_kernels_know_the_common_formats():
    assert frozenset(COMMON_FORMATS) == FORMATS


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
@pytest.mark.parametrize("name", [*COMMON_FORMATS, "Q5_0", "Q5_K", "IQ4_NL"])
def test_numbers_equal_those_of_the_gguf_package(name):
    raw, layout = blocks(name), find_format(name)
    assert layout is not None
    want = gguf.dequantize(raw, gguf.GGMLQuantizationType[name]).reshape(-1)
    out = np.full(want.shape, 7.0, np.float32)
    decode(layout, raw.reshape(-1), out)
    is_number = ~np.isnan(want)
    np.testing.assert_array_equal(out.view(np.uint32)[is_number], want.view(np.uint32)[is_number])
    assert np.isnan(out[~is_number]).all()

    rounded = np.full(want.shape, 7, np.uint16)
    decode(layout, raw.reshape(-1), rounded)
    theirs = torch.from_numpy(want).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(rounded[is_number], theirs[is_number])
    assert np.isnan(as_floats(rounded[~is_number])).all()


def test_header_equals_that_of_the_gguf_package(file):
    ours, theirs = read_gguf(file), gguf.GGUFReader(file)
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(ours.metadata) == keys
    for key in keys:
        value = ours.metadata[key]
        plain = value.tolist() if isinstance(value, np.ndarray) else value
        assert plain == theirs.fields[key].contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert info.format.name == tensor.tensor_type.name
        assert (info.offset, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("quantise", COMMON_FORMATS)
def test_weights_are_what_the_file_says(quantise, packing, folder, tmp_path):
    path = gguf_factory.convert(folder, tmp_path / "model.gguf", quantise)
    header = read_gguf(path)
    config = config_from_gguf(header)
    weights = load_weights(
        Checkpoint.from_gguf(header), config, DType.FLOAT32, packing=packing, num_threads=2
    )
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def stored(name: str) -> np.ndarray:
        tensor = theirs[name]
        shape = tuple(reversed(tensor.shape.tolist()))
        rows = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        if packing is Packing.INT4:
            return packed_rows.encoded(rows, "Q8_0" if name == "token_embd.weight" else "Q4_1")
        return packed_rows.rounded_to_int8(rows) if packing is Packing.INT8 else rows

    def undone(name: str, num_heads: int) -> np.ndarray:
        rows = stored(name)
        half = config.head_dim // 2
        pairs = rows.reshape(num_heads, half, 2, -1)
        return np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(rows.shape)

    layer, at = weights.layers[1], "blk.1."
    q = undone(at + "attn_q.weight", config.num_q_heads)
    k = undone(at + "attn_k.weight", config.num_kv_heads)
    v = stored(at + "attn_v.weight")
    np.testing.assert_array_equal(packed_rows.as_floats(layer.qkv), np.concatenate([q, k, v]))
    gate, up = stored(at + "ffn_gate.weight"), stored(at + "ffn_up.weight")
    np.testing.assert_array_equal(packed_rows.as_floats(layer.gate_up), np.concatenate([gate, up]))
    np.testing.assert_array_equal(packed_rows.as_floats(layer.down), stored(at + "ffn_down.weight"))
    np.testing.assert_array_equal(
        packed_rows.as_floats(weights.embedding), stored("token_embd.weight")
    )
    assert weights.lm_head is weights.embedding

    halved = load_weights(Checkpoint.from_gguf(header), config, DType.BFLOAT16, packing=packing)
    if packing is not Packing.AS_COMPUTED:
        assert halved.num_bytes() < weights.num_bytes()
        np.testing.assert_array_equal(
            packed_rows.as_floats(halved.layers[1].qkv), packed_rows.as_floats(layer.qkv)
        )
    else:
        assert halved.num_bytes() * 2 == weights.num_bytes()
        rounded = (
            torch.from_numpy(packed_rows.as_floats(layer.qkv)).to(torch.bfloat16).float().numpy()
        )
        np.testing.assert_array_equal(packed_rows.as_floats(halved.layers[1].qkv), rounded)


@pytest.mark.parametrize("quantise", [*COMMON_FORMATS, "Q5_0"])
def test_as_stored_computes_the_bits_of_float32(quantise, folder, tmp_path, monkeypatch):
    # Where there are bfloat16 instructions, auto computes a bfloat16 file with those.
    without = [isa for isa in cpu.available_isas() if not isa.endswith("bf16")]
    monkeypatch.setenv(ISA_VARIABLE, without[-1])
    path = gguf_factory.convert(folder, tmp_path / "model.gguf", quantise)
    rng = np.random.default_rng(2)
    sequences = [rng.integers(0, model_factory.VOCAB_SIZE, n).tolist() for n in (3, 40, 1)]
    logits = []
    for dtype in ("auto", "float32"):
        runner = CpuRunner.load(resolve(str(path)), dtype=dtype, num_threads=2)
        assert runner.dtype is DType.FLOAT32
        logits.append(drive(runner, PlanBuilder(), sequences, lambda step, sequence: 7 + step))
    for ours, theirs in zip(*logits, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("quantise", ["Q4_1", "Q4_K", "F32"])
def test_logits_do_not_depend_on_company(quantise, folder, tmp_path):
    """To the last bit: alone or beside others, in one chunk or token by token."""
    path = gguf_factory.convert(folder, tmp_path / "model.gguf", quantise)
    rng = np.random.default_rng(3)
    sequences = [rng.integers(0, model_factory.VOCAB_SIZE, n).tolist() for n in (21, 200, 2, 65)]
    runners = [CpuRunner.load(resolve(str(path)), num_threads=n) for n in (1, 2)]
    together = drive(runners[0], PlanBuilder(), sequences, lambda step, sequence: 1000)
    for chunk, runner in ((1, runners[1]), (7, runners[0]), (64, runners[1])):
        for tokens, want in zip(sequences, together, strict=True):
            alone = drive(runner, PlanBuilder(), [tokens], lambda *_, chunk=chunk: chunk)
            np.testing.assert_array_equal(alone[0], want)


@pytest.mark.parametrize(
    ("name", "quantise"),
    # A file of Llama 3 has its scaling as a tensor; transformers ignores it, and it is not here.
    [("llama", "Q8_0"), ("llama3", "F16"), ("qwen2", "Q4_1"), ("qwen3", "BF16")],
)
def test_logits_equal_transformers_reading_the_same_file(name, quantise, tmp_path):
    # transformers takes no head size from a GGUF file of Qwen3, only its default.
    changes = {"head_dim": 128} if name == "qwen3" else {}
    folder = model_factory.make(name, tmp_path, **changes)
    path = gguf_factory.convert(folder, tmp_path / "model.gguf", quantise)
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, model_factory.VOCAB_SIZE, n).tolist() for n in (5, 33)]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    runner = CpuRunner.load(resolve(path), dtype="float32", num_threads=1)
    got = drive(runner, PlanBuilder(), sequences, lambda step, sequence: 9)
    with torch.inference_mode():
        for tokens, ours in zip(sequences, got, strict=True):
            theirs = model(torch.tensor([tokens])).logits[0].numpy()
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_rope_divisors_are_the_scaling_of_llama3(tmp_path):
    """``rope_freqs.weight`` does what ``rope_scaling`` says in a ``config.json``."""
    folder = model_factory.make("llama3", tmp_path)
    scaled = resolve(folder).config()
    plain = scaled.rope.theta ** -(np.arange(0, scaled.head_dim, 2) / scaled.head_dim)
    wavelengths = 2 * np.pi / plain
    rope = scaled.rope
    smooth = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    factors = 1 / ((1 - smooth) / rope.factor + smooth)
    factors[wavelengths < rope.original_max_positions / rope.high_freq_factor] = 1.0
    factors[wavelengths > rope.original_max_positions / rope.low_freq_factor] = rope.factor
    assert 1.0 < np.sort(factors)[len(factors) // 2] <= rope.factor

    path = tmp_path / "model.gguf"
    gguf_factory.convert(folder, path, extra={"rope_freqs.weight": factors.astype(np.float32)})
    tokens = np.random.default_rng(2).integers(0, model_factory.VOCAB_SIZE, 90).tolist()
    logits = [
        drive(
            CpuRunner.load(resolve(source), dtype="float32", num_threads=1),
            PlanBuilder(),
            [tokens],
            lambda step, sequence: 64,
        )[0]
        for source in (folder, path)
    ]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)


def test_a_folder_with_one_gguf_file_is_that_file(file):
    assert resolve(file.parent).path == file
    assert resolve(file.parent).config() == config_from_gguf(read_gguf(file))


def error_of(path: Path) -> str:
    """What loading says, with the folder's name taken out."""
    with pytest.raises(ModelError) as caught:
        CpuRunner.load(resolve(path), num_threads=1)
    return str(caught.value).replace(f"{path.parent}/", "")


@pytest.mark.parametrize(
    ("keep", "want"),
    [
        (3, "bad.gguf: 3 bytes are too few for a GGUF file"),
        (0.005, "bad.gguf: truncated: the header reaches beyond byte"),
        (0.999, "bad.gguf: truncated: tensor "),
    ],
)
def test_a_truncated_file_is_named(keep, want, file, tmp_path):
    data = file.read_bytes()
    path = tmp_path / "bad.gguf"
    path.write_bytes(data[: int(keep * len(data)) if keep < 1 else keep])
    message = error_of(path)
    assert message.startswith(want)
    if keep == 0.999:
        size = path.stat().st_size
        assert message.endswith(f", the file has {size}; download or copy it again")


def test_every_cut_of_the_header_is_an_error(file, tmp_path):
    data = file.read_bytes()
    end = min(info.offset for info in read_gguf(file).tensors.values())
    path = tmp_path / "bad.gguf"
    for kept in [*range(24, 200), *range(200, end, 997)]:
        path.write_bytes(data[:kept])
        with pytest.raises(ModelError, match=r"truncated|too few"):
            read_gguf(path)


@pytest.mark.parametrize(
    ("offset", "word", "want"),
    [
        (
            0,
            b"PK\x03\x04",
            "bad.gguf: not a GGUF file (it starts with b'PK\\x03\\x04', want b'GGUF')",
        ),
        (4, struct.pack("<I", 9), "bad.gguf: GGUF version 9; little-endian 2 and 3 are read"),
        (
            8,
            struct.pack("<Q", 1 << 40),
            "bad.gguf: corrupt: the header counts 1099511627776 tensors and ",
        ),
    ],
)
def test_a_broken_header_is_explained(offset, word, want, file, tmp_path):
    data = bytearray(file.read_bytes())
    data[offset : offset + len(word)] = word
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    assert error_of(path).startswith(want)


def packed_string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("key", "value", "want"),
    [
        ("split.count", struct.pack("<I", 8) + packed_string("2"), "split.count is '2'"),
        ("split.count", struct.pack("<IIQII", 9, 4, 2, 1, 1), "split.count is "),
        (
            "x",
            struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 10_000,
            "x has arrays nested more than 8 deep",
        ),
    ],
)
def test_metadata_of_another_type_is_corrupt(key, value, want, tmp_path):
    path = tmp_path / "bad.gguf"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    path.write_bytes(header + packed_string(key) + value)
    with pytest.raises(ModelError, match="corrupt: (metadata )?" + want):
        read_gguf(path)


def test_arrays_may_hold_arrays(tmp_path):
    path = tmp_path / "nested.gguf"
    inner = struct.pack("<IQ", 4, 2)  # uint32, two of them.
    value = struct.pack("<IIQ", 9, 9, 2) + inner + struct.pack("<II", 1, 2)
    value += inner + struct.pack("<II", 3, 4)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + packed_string("x") + value)
    assert [row.tolist() for row in read_gguf(path).metadata["x"]] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("shape", [(), (7,), (7, 8, 9)])
def test_an_embedding_has_two_dimensions(shape, file):
    found = read_gguf(file)
    tensors = dict(found.tensors)
    tensors["token_embd.weight"] = replace(tensors["token_embd.weight"], shape=shape)
    with pytest.raises(ModelError, match="the architecture wants two dimensions"):
        config_from_gguf(replace(found, tensors=tensors))


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_rope_divisors_are_above_zero(bad, tmp_path):
    folder = model_factory.make("llama3", tmp_path)
    divisors = np.full(resolve(folder).config().head_dim // 2, 2.0, np.float32)
    divisors[3] = bad
    path = tmp_path / "model.gguf"
    gguf_factory.convert(folder, path, extra={"rope_freqs.weight": divisors})
    assert "want finite numbers above 0" in error_of(path)


def test_random_damage_never_escapes_as_another_error(file, tmp_path):
    """A flipped byte in the header is either harmless or a ModelError."""
    data = file.read_bytes()
    end = min(info.offset for info in read_gguf(file).tensors.values())
    rng = np.random.default_rng(3)
    path = tmp_path / "bad.gguf"
    for _ in range(150):
        damaged = bytearray(data)
        damaged[int(rng.integers(4, end))] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with contextlib.suppress(ModelError):
            config_from_gguf(read_gguf(path))


@pytest.mark.parametrize(
    ("change", "want"),
    [
        (
            {"leave_out": ("blk.1.ffn_up.weight", "output_norm.weight")},
            "bad.gguf: 2 tensors are missing: blk.1.ffn_up.weight, output_norm.weight; the file is "
            "incomplete or belongs to another architecture",
        ),
        (
            {"extra": {"blk.0.attn_gate.weight": np.zeros((4, 256), np.float32)}},
            "bad.gguf: 1 tensors have no place in a llama model: blk.0.attn_gate.weight; running "
            "without them would give wrong results",
        ),
        (
            {"metadata": {"llama.feed_forward_length": 512}},
            "bad.gguf: tensor blk.0.ffn_gate.weight has shape [256, 256], the architecture wants "
            "[512, 256]",
        ),
        (
            {"metadata": {"llama.expert_count": 8}},
            "bad.gguf: architecture llama with 8 experts is not supported; the supported ones are "
            "llama, mistral, qwen2, qwen3",
        ),
        (
            {"metadata": {"llama.rope.scaling.type": "yarn"}},
            "bad.gguf: rope scaling 'yarn' is not supported; the supported ones are none and "
            "linear",
        ),
        (
            {"metadata": {"llama.block_count": None}},
            "bad.gguf: metadata has no llama.block_count; the file cannot be used without",
        ),
    ],
)
def test_what_does_not_fit_is_named(change, want, folder, tmp_path):
    path = gguf_factory.convert(folder, tmp_path / "bad.gguf", **change)
    assert error_of(path) == want


def test_another_architecture_is_named(folder, tmp_path):
    path = gguf_factory.convert(folder, tmp_path / "bad.gguf", arch="gemma3")
    assert error_of(path) == (
        "bad.gguf: architecture gemma3 is not supported; the supported ones are llama, mistral, "
        "qwen2, qwen3"
    )
