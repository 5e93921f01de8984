"""Weights of eight and four bits, from options to logits.

Products are tested bit by bit in ``rust/cpu/tests/int8.rs`` and ``product.rs``; here it is models
of every format that files have, against the same quantization in float64.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import gguf_factory
import model_factory
from fastserve import LLM, ConfigError, ModelError, SamplingParams
from fastserve.models.checkpoint import TensorReader
from fastserve.models.memory import KvDType
from fastserve.models.packed import PackedMatrix, PackedRows, Quantized
from fastserve.models.resolve import resolve
from fastserve.models.tensors import DType, TensorInfo, find_format
from fastserve.models.weights import LayerWeights
from fastserve.runner import CpuRunner
from packed_rows import as_floats, rounded_to_int8
from plans import PlanBuilder, drive

LENGTHS = (1, 15, 16, 17, 48, 70)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def load(
    path: Path, dtype: str = "auto", quantization: Literal["int8", "int4"] = "int8"
) -> CpuRunner:
    return CpuRunner.load(resolve(path), dtype=dtype, quantization=quantization, num_threads=1)


class Int8Linear(torch.nn.Module):
    """A product in float64, of int8 weights and of rows rounded to int8."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = torch.from_numpy(
            rounded_to_int8(linear.weight.detach().float().numpy())
        ).double()
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        numbers = (x / torch.where(scale > 0, scale, torch.inf)).round()
        out = numbers * scale @ self.weight.T
        return out if self.bias is None else out + self.bias


@torch.inference_mode()
def simulated(folder: Path, sequences: list[list[int]]) -> tuple[list[np.ndarray], ...]:
    """Logits of transformers in float64, with int8 products and with plain ones."""
    model = model_factory.reference(folder).double()
    plain = [model(torch.tensor([tokens])).logits[0].numpy() for tokens in sequences]
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Int8Linear(module))
    embedding = model.get_input_embeddings()
    numbers = rounded_to_int8(embedding.weight.float().numpy())
    embedding.weight = torch.nn.Parameter(torch.from_numpy(numbers).double(), requires_grad=False)
    return [model(torch.tensor([tokens])).logits[0].numpy() for tokens in sequences], plain


@pytest.mark.parametrize("name", model_factory.VARIANTS)
def test_logits_equal_the_same_quantization_in_float64(name: str, models: Path) -> None:
    """An activation as near to the middle of two integers as float32 is exact may become either.

    That happens to some tokens; these and those that attend to them are then off by a part of what
    int8 costs. The others are as near to float64 as float32 is.
    """
    folder = model_factory.make(name, models)
    rng = np.random.default_rng(3)
    sequences = [rng.integers(0, model_factory.VOCAB_SIZE, length).tolist() for length in LENGTHS]
    want, plain = simulated(folder, sequences)
    got = drive(load(folder), PlanBuilder(), sequences, lambda step, sequence: 7 + sequence)
    off = np.concatenate([np.abs(a - b).max(axis=1) for a, b in zip(got, want, strict=True)])
    cost = np.concatenate([np.abs(a - b).max(axis=1) for a, b in zip(plain, want, strict=True)])
    assert np.quantile(off, 0.25) < 1e-5
    assert off.max() < cost.max()
    assert np.median(cost) > 0.01, "int8 costs too little to tell a mistake"


def matrices(runner: CpuRunner) -> list[PackedMatrix]:
    weights = runner.weights
    layers = [getattr(layer, name) for layer in weights.layers for name in LayerWeights.__slots__]
    found = [weights.embedding, weights.lm_head, *layers]
    return [matrix for matrix in found if isinstance(matrix, PackedMatrix)]


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q5_0"])
def test_files_are_quantized(kind: str, models: Path, tmp_path: Path) -> None:
    """Dequantized, then quantized by rows: to a byte a number, and eight a row.

    Every other format is in ``test_weights_gguf.py``.
    """
    folder = model_factory.make("llama", models)
    file = gguf_factory.convert(folder, tmp_path / "model.gguf", kind)
    plain = CpuRunner.load(resolve(file), dtype="float32", num_threads=1)
    runner = load(file)
    assert runner.weights.formats() == ["I8"]
    num_bytes = 0
    for ours, exact in zip(matrices(runner), matrices(plain), strict=True):
        want = rounded_to_int8(as_floats(exact))
        np.testing.assert_array_equal(as_floats(ours), want)
        num_bytes += ours.shape[0] * (ours.shape[1] + 8)
    tied = runner.weights.embedding
    num_bytes -= tied.shape[0] * (tied.shape[1] + 8)
    num_norms = 4 * (2 * len(runner.weights.layers) + 1) * tied.shape[1]
    assert runner.weight_bytes == num_bytes + num_norms


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q5_0"])
def test_four_bits_are_nearer_than_those_of_a_file(kind: str, models: Path, tmp_path: Path) -> None:
    """The ``gguf`` package's Q4_1 takes the extremes of a group; the embedding is its Q8_0."""
    folder = model_factory.make("llama", models)
    file = gguf_factory.convert(folder, tmp_path / "model.gguf", kind)
    plain = CpuRunner.load(resolve(file), dtype="float32", num_threads=1)
    runner = load(file, quantization="int4")
    assert runner.weights.formats() == ["Q8_0", "Q4_1"]
    of_vocabulary = (runner.weights.embedding, runner.weights.lm_head)
    totals = np.zeros(2)
    for ours, exact in zip(matrices(runner), matrices(plain), strict=True):
        rows = as_floats(exact)
        name = "Q8_0" if ours in of_vocabulary else "Q4_1"
        theirs = gguf.GGMLQuantizationType[name]
        packed = gguf.dequantize(gguf.quantize(rows, theirs), theirs)
        errors = [
            np.square(found.astype(np.float64) - rows).sum() for found in (as_floats(ours), packed)
        ]
        assert errors[0] <= errors[1] * 1.001
        if name == "Q4_1":
            totals += errors
        num_bytes = {"Q8_0": 34, "Q4_1": 20}[name] * rows.size // 32
        assert num_bytes <= ours.nbytes <= num_bytes * 1.1
    assert 0 < totals[0] < 0.9 * totals[1]


def test_four_bits_again_change_little(models: Path, tmp_path: Path) -> None:
    """What was four bits in groups of 32 before can be said as exactly."""
    folder = model_factory.make("llama", models)
    file = gguf_factory.convert(folder, tmp_path / "model.gguf", "Q4_1")
    plain = CpuRunner.load(resolve(file), dtype="float32", num_threads=1)
    runner = load(file, quantization="int4")
    for ours, exact in zip(matrices(runner)[2:], matrices(plain)[2:], strict=True):
        got, want = as_floats(ours), as_floats(exact)
        assert np.abs(got - want).max() <= 2e-3 * np.abs(want).max()


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_four_bits_cost_what_their_weights_do(dtype: str, models: Path) -> None:
    """Logits are those of a float64 model with the same weights: activations are not rounded."""
    folder = model_factory.make("llama", models)
    runner = load(folder, dtype, "int4")
    model = model_factory.reference(folder).double()
    exact = CpuRunner.load(resolve(folder), dtype="float32", num_threads=1)
    replaced = [
        (as_floats(a), as_floats(b)) for a, b in zip(*map(matrices, (exact, runner)), strict=True)
    ]
    for parameter in model.parameters():
        if parameter.dim() == 2:
            numbers = parameter.detach().float().numpy()
            parameter.data = torch.from_numpy(_replaced(numbers, replaced)).double()
    tokens = list(range(5, 60))
    with torch.inference_mode():
        want = model(torch.tensor([tokens])).logits[0].numpy()
    (got,) = drive(runner, PlanBuilder(), [tokens], lambda step, sequence: 20)
    spread = np.sqrt(np.mean((got - want) ** 2)) / np.std(want)
    assert spread < (1e-5 if dtype == "auto" else 0.03)


def _replaced(numbers: np.ndarray, replaced: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The rows of `replaced`'s second that begin where `numbers` is found in its first."""
    for exact, rounded in replaced:
        for first in range(len(exact) - len(numbers) + 1):
            if np.array_equal(exact[first : first + len(numbers)], numbers):
                return rounded[first : first + len(numbers)]
    raise AssertionError("a matrix of the model is in none of ours")


def test_rows_that_are_no_whole_groups_are_named(tmp_path: Path) -> None:
    layout = find_format("F32")
    assert layout is not None
    info = TensorInfo("odd", (2, 40), layout, tmp_path / "file", 0)
    info.path.write_bytes(bytes(info.num_bytes))
    rows = PackedRows(info.shape, DType.FLOAT32, Quantized("int4", "Q4_1"))
    with (
        TensorReader(lambda num_bytes: None) as reader,
        pytest.raises(
            ModelError, match=r"tensor odd cannot be quantized to int4: .* multiple of 32"
        ),
    ):
        rows.read(reader, info)


def test_dtype_says_what_the_rest_is(models: Path) -> None:
    folder = model_factory.make("qwen3", models)
    exact, narrow = load(folder), load(folder, "bfloat16")
    assert load(folder).dtype is DType.FLOAT32
    assert (exact.dtype, narrow.dtype) == (DType.FLOAT32, DType.BFLOAT16)
    assert narrow.kv_dtype is KvDType.BFLOAT16
    assert narrow.weights.formats() == ["I8"]
    tokens = [list(range(5, 40))]
    ours, theirs = (
        drive(runner, PlanBuilder(), tokens, lambda step, sequence: 20)[0]
        for runner in (narrow, exact)
    )
    spread = np.sqrt(np.mean((ours - theirs) ** 2)) / np.std(theirs)
    assert 0 < spread < 0.1


@pytest.mark.parametrize(("number", "name"), [(np.nan, "NaN"), (np.inf, "inf"), (-np.inf, "-inf")])
@pytest.mark.parametrize(
    ("quantization", "want"),
    [
        ("int8", "rows: got {}, want finite numbers, for int8; run"),
        ("int4", "numbers: got {}, want -65504 to 65504, for Q4_1; choose int8, or run"),
    ],
)
def test_weights_without_a_scale_are_named(
    models: Path,
    tmp_path: Path,
    number: float,
    name: str,
    quantization: Literal["int8", "int4"],
    want: str,
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(model_factory.make("llama", models), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = number
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as refusal:
        load(folder, quantization=quantization)
    assert str(refusal.value) == (
        f"{folder / 'model.safetensors'}: tensor model.layers.1.self_attn.k_proj.weight cannot be "
        f"quantized to {quantization}: {want.format(name)} the model without quantization"
    )


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_what_overflows_ends_its_request_alone(
    models: Path, tmp_path: Path, quantization: Literal["int8"] | None
) -> None:
    """Token 9 is all in one dimension, and the last norm makes that infinite."""
    folder = tmp_path / "overflowing"
    shutil.copytree(model_factory.make("llama-linear", models), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][9] = 0.0
    tensors["model.embed_tokens.weight"][9, 3] = 1000.0
    tensors["model.norm.weight"][3] = 8e37  # Times 8, the root of hidden_size, it overflows.
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompts = [{"prompt_token_ids": tokens} for tokens in ([5, 6, 7], [9], [8, 7])]
    with LLM(folder, quantization=quantization, num_blocks=20) as llm:
        outputs = llm.generate(prompts, params, progress=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]


def test_rows_that_are_too_long_are_named(tmp_path: Path) -> None:
    layout = find_format("F32")
    assert layout is not None
    info = TensorInfo("long", (1, 2**17 + 1), layout, tmp_path / "file", 0)
    info.path.write_bytes(bytes(info.num_bytes))
    rows = PackedRows(info.shape, DType.FLOAT32, Quantized("int8", "I8"))
    with (
        TensorReader(lambda num_bytes: None) as reader,
        pytest.raises(ModelError, match=r"tensor long cannot be quantized to int8: .* to 131072"),
    ):
        rows.read(reader, info)


def test_the_option_and_the_log(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = model_factory.make("llama", models)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    caplog.set_level(logging.INFO, "fastserve")
    with LLM(folder, quantization="int8", num_blocks=20) as llm:
        assert len(llm.generate(["the quick"], params, progress=False)[0].outputs[0].token_ids) > 0
    assert any("weights in I8, computed in float32" in record.message for record in caplog.records)


def test_a_wrong_value_names_the_choices() -> None:
    for value in ("int2", "fp8", "", True, 8):
        with pytest.raises(ConfigError) as refusal:
            LLM("smollm2", quantization=value)  # type: ignore[arg-type]
        assert (
            str(refusal.value) == f"EngineConfig: quantization={value!r}: want None, 'int8', 'int4'"
        )
