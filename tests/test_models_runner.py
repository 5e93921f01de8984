"""What a CPU runner computes in, with how many threads, and what it reads from a plan."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import gguf_factory
import model_factory
from fastserve import host
from fastserve.errors import ModelError
from fastserve.models.memory import KvDType
from fastserve.models.resolve import resolve
from fastserve.models.tensors import DType
from fastserve.runner import CpuRunner


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return model_factory.make("llama", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("stored", "native", "want"),
    [
        (torch.float32, True, DType.FLOAT32),
        (torch.float16, True, DType.FLOAT32),
        (torch.bfloat16, True, DType.BFLOAT16),
        (torch.bfloat16, False, DType.FLOAT32),
    ],
)
def test_auto_is_the_files_format_where_that_is_fast(
    stored, native, want, folder, tmp_path, monkeypatch
):
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    tensors = load_file(copy / "model.safetensors")
    tensors = {
        name: tensor if "norm" in name else tensor.to(stored) for name, tensor in tensors.items()
    }
    save_file(tensors, copy / "model.safetensors")
    monkeypatch.setattr("fastserve.runner.multiplies_bfloat16", lambda pool: native)
    runner = CpuRunner.load(resolve(copy), num_threads=1)
    assert (runner.dtype, runner.kv_dtype) == (want, want)
    formats = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    assert runner.weights.formats() == [formats[stored]], "as stored"


def test_auto_dequantizes_to_float32(folder, tmp_path):
    path = gguf_factory.convert(folder, tmp_path / "model.gguf", "Q8_0")
    assert CpuRunner.load(resolve(path), num_threads=1).dtype is DType.FLOAT32


@pytest.mark.parametrize(
    ("stored", "token_bytes"),
    [("float32", 64 * 4), ("bfloat16", 64 * 2), ("int8", 64 + 2 * 4)],
)
def test_keys_and_values_may_be_kept_in_another_format(stored, token_bytes, folder):
    """Of two heads of 32 each; int8 has a scale of four bytes for each."""
    runner = CpuRunner.load(resolve(folder), dtype="float32", kv_cache_dtype=stored, num_threads=1)
    assert (runner.dtype, runner.kv_dtype) == (DType.FLOAT32, KvDType(stored))
    for block_size in (8, 16, 32):
        num_bytes = runner.kv_bytes_per_block(block_size)
        assert num_bytes == 3 * block_size * 2 * token_bytes
        runner.allocate_kv(10, block_size, np.zeros((2, 4), dtype=np.int32))
        assert runner._cache is not None
        assert runner._cache.kv.nbytes == 10 * num_bytes, "as announced"


def test_threads_are_as_many_as_asked_for(folder):
    for asked, num_threads in ((2, 2), (None, host.cpus().num_usable)):
        runner = CpuRunner.load(resolve(folder), dtype="float32", num_threads=asked)
        assert runner.pool.num_threads == num_threads


def test_heads_that_the_kernels_do_not_take_are_refused_at_load(tmp_path):
    folder = model_factory.make("llama", tmp_path, head_dim=12)
    with pytest.raises(ModelError) as caught:
        CpuRunner.load(resolve(folder), num_threads=1)
    assert str(caught.value) == (
        f"{folder}: the CPU kernels cannot run this model: head_dim: got 12, want a multiple of 8, "
        "at most 256"
    )


def test_a_step_before_the_cache_is_a_bug(folder):
    runner = CpuRunner.load(resolve(folder), num_threads=1)
    with pytest.raises(RuntimeError, match="allocate_kv comes before"):
        runner.forward(None, np.zeros(1, dtype=np.int32))
