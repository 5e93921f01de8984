"""Weights from Hugging Face folders: one file or many, and what is said about broken ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import model_factory
from fastserve.errors import ModelError
from fastserve.models.checkpoint import Checkpoint
from fastserve.models.resolve import resolve
from fastserve.models.weights import DecoderWeights, load_weights


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return model_factory.make("llama-biases", tmp_path_factory.mktemp("one"))


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


def load(folder: Path, dtype: torch.dtype = torch.float32, **options) -> DecoderWeights:
    source = resolve(folder)
    return load_weights(Checkpoint.from_folder(source.path), source.config(), dtype, **options)


def stored(folder: Path, name: str) -> torch.Tensor:
    return load_file(folder / "model.safetensors")[name]


def test_rows_of_fused_weights_are_the_files_tensors(folder):
    weights, at = load(folder, num_threads=2), "model.layers.2."
    layer = weights.layers[2]
    qkv = [stored(folder, f"{at}self_attn.{part}_proj.weight") for part in "qkv"]
    assert torch.equal(layer.qkv, torch.cat(qkv))
    biases = [stored(folder, f"{at}self_attn.{part}_proj.bias") for part in "qkv"]
    assert layer.qkv_bias is not None
    assert torch.equal(layer.qkv_bias, torch.cat(biases))
    gate_up = [stored(folder, f"{at}mlp.{part}_proj.weight") for part in ("gate", "up")]
    assert torch.equal(layer.gate_up, torch.cat(gate_up))
    assert torch.equal(layer.down, stored(folder, f"{at}mlp.down_proj.weight"))
    assert torch.equal(weights.lm_head, stored(folder, "lm_head.weight"))


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
def test_numbers_are_rounded_once(kept, computed, copy):
    path = copy / "model.safetensors"
    save_file({name: tensor.to(kept) for name, tensor in load_file(path).items()}, path)
    weights = load(copy, computed)
    want = stored(copy, "model.layers.0.mlp.down_proj.weight").to(computed)
    assert torch.equal(weights.layers[0].down, want)
    assert weights.embedding.dtype == computed


def test_shards_equal_one_file(folder, tmp_path):
    sharded = model_factory.make("llama-biases", tmp_path, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    one, many = load(folder), load(sharded, num_threads=2)
    assert torch.equal(one.embedding, many.embedding)
    for ours, theirs in zip(one.layers, many.layers, strict=True):
        assert torch.equal(ours.qkv, theirs.qkv)
        assert torch.equal(ours.down, theirs.down)


def test_progress_counts_every_byte_once(folder):
    seen: list[tuple[int, int]] = []
    load(folder, num_threads=2, progress=lambda done, total: seen.append((done, total)))
    num_bytes = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert seen[-1] == (num_bytes, num_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_loading_leaves_the_number_of_threads_alone(folder):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        load(folder, num_threads=3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_error_in_the_progress_bar_stops_the_load(folder):
    def broken(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(folder, num_threads=2, progress=broken)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_the_weights_and_a_buffer(tmp_path):
    """Read in a process of its own, from a file in another format than is computed in."""
    wide = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 8, "head_dim": 64}
    folder = model_factory.make("llama", tmp_path, **wide)
    path = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    measured = run_python(
        f"""
        import resource, torch
        from pathlib import Path
        from fastserve.models.checkpoint import Checkpoint
        from fastserve.models.resolve import resolve
        from fastserve.models.weights import load_weights
        source = resolve({str(folder)!r})
        torch.empty(1).fill_(1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        checkpoint = Checkpoint.from_folder(source.path)
        weights = load_weights(checkpoint, source.config(), torch.float32, num_threads=2)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(weights.num_bytes() >> 20, (after - before) >> 10)
        """
    )
    weights_mb, grown_mb = map(int, measured.split())
    assert weights_mb > 200
    assert grown_mb < weights_mb + 40


def run_python(script: str) -> str:
    environment = os.environ | {"PYTHONPATH": "python", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parent.parent,
        env=environment,
    ).stdout


def error_of(folder: Path) -> str:
    """What loading says, with the folder's name taken out."""
    with pytest.raises(ModelError) as caught:
        load(folder)
    return str(caught.value).replace(str(folder), "MODEL")


def test_a_truncated_file_is_named(copy):
    path = copy / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    message = error_of(copy)
    assert message.startswith("MODEL/model.safetensors: truncated: tensor ")
    assert message.endswith(
        f" ends at byte {len(data)}, the file has {len(data) - 5}; download or copy it again"
    )
    path.write_bytes(data[:500])
    assert error_of(copy).startswith("MODEL/model.safetensors: truncated: the header ends at byte")
    path.write_bytes(data[:4])
    assert error_of(copy) == "MODEL/model.safetensors: not a safetensors file, or a corrupt one"


def with_header(path: Path, change) -> None:
    """Rewrite a safetensors file's header."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_a_header_that_contradicts_itself_is_explained(copy):
    path = copy / "model.safetensors"
    with_header(path, lambda header: header["model.norm.weight"].update(shape=[65]))
    assert error_of(copy) == (
        "MODEL/model.safetensors: corrupt: tensor model.norm.weight of shape [65] in F32 takes 260 "
        "bytes, the header gives it 256"
    )
    with_header(path, lambda header: header.update({"model.norm.weight": {"dtype": "F32"}}))
    assert error_of(copy) == (
        "MODEL/model.safetensors: corrupt: the header says of model.norm.weight: {'dtype': 'F32'}"
    )


def save_changed(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_missing_tensors_are_named(copy):
    save_changed(copy, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert error_of(copy) == (
        "MODEL: 1 tensors are missing: model.layers.1.mlp.up_proj.weight; the file is incomplete "
        "or belongs to another architecture"
    )


def test_a_wrong_shape_is_named(copy):
    save_changed(copy, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    assert error_of(copy) == (
        "MODEL/model.safetensors: tensor model.norm.weight has shape [63], the architecture wants "
        "[64]"
    )


def test_a_tensor_that_nothing_uses_is_an_error(copy):
    """Biases that the configuration does not mention would be dropped in silence otherwise."""
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(settings | {"mlp_bias": False}))
    assert error_of(copy) == (
        "MODEL: 9 tensors have no place in a llama model: model.layers.0.mlp.down_proj.bias, "
        "model.layers.0.mlp.gate_proj.bias, model.layers.0.mlp.up_proj.bias, …; running without "
        "them would give wrong results"
    )


def test_a_number_format_that_is_not_read_is_named(copy):
    save_changed(
        copy, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64).double()})
    )
    assert error_of(copy) == (
        "MODEL/model.safetensors: tensor model.norm.weight has number format F64, which is not "
        "supported"
    )


def test_missing_shards_and_pickles_are_explained(tmp_path):
    sharded = model_factory.make("llama-biases", tmp_path, max_shard_size="60KB")
    victim = sorted(sharded.glob("model-*.safetensors"))[1]
    victim.unlink()
    assert error_of(sharded) == (
        f"MODEL/{victim.name}: missing, and model.safetensors.index.json names it; download the "
        "folder again"
    )
    for path in sharded.glob("model*"):
        path.unlink()
    assert error_of(sharded) == "MODEL: no model.safetensors and no model.safetensors.index.json"
    (sharded / "pytorch_model.bin").write_bytes(b"x")
    assert error_of(sharded) == (
        "MODEL: pytorch_model.bin is a pickle, which can run any code and is not read; convert the "
        "model to safetensors"
    )
