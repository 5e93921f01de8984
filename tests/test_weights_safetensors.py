"""Weights from Hugging Face folders: one file or many, and what is said about broken ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import model_factory
from fastserve.errors import ModelError
from fastserve.models.checkpoint import Checkpoint
from fastserve.models.packed import PackedMatrix
from fastserve.models.resolve import resolve
from fastserve.models.tensors import DType
from fastserve.models.weights import DecoderWeights, Packing, load_weights
from packed_rows import as_floats


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return model_factory.make("llama-biases", tmp_path_factory.mktemp("one"))


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


def load(folder: Path, dtype: DType = DType.FLOAT32, **options) -> DecoderWeights:
    source, packing = resolve(folder), options.pop("packing", Packing.AS_COMPUTED)
    checkpoint = Checkpoint.from_folder(source.path)
    return load_weights(checkpoint, source.config(), dtype, packing=packing, **options)


def stored(folder: Path, name: str) -> np.ndarray:
    return load_file(folder / "model.safetensors")[name].numpy()


def numbers(ours: PackedMatrix | np.ndarray | None) -> np.ndarray:
    assert ours is not None
    return as_floats(ours) if isinstance(ours, PackedMatrix) else ours


def same(ours: PackedMatrix | np.ndarray | None, theirs: np.ndarray) -> bool:
    return np.array_equal(numbers(ours), theirs)


def test_rows_of_fused_weights_are_the_files_tensors(folder):
    weights, at = load(folder, num_threads=2), "model.layers.2."
    layer = weights.layers[2]
    qkv = [stored(folder, f"{at}self_attn.{part}_proj.weight") for part in "qkv"]
    assert same(layer.qkv, np.concatenate(qkv))
    biases = [stored(folder, f"{at}self_attn.{part}_proj.bias") for part in "qkv"]
    assert same(layer.qkv_bias, np.concatenate(biases))
    gate_up = [stored(folder, f"{at}mlp.{part}_proj.weight") for part in ("gate", "up")]
    assert same(layer.gate_up, np.concatenate(gate_up))
    assert same(layer.down, stored(folder, f"{at}mlp.down_proj.weight"))
    assert same(weights.lm_head, stored(folder, "lm_head.weight"))


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("computed", DType)
def test_numbers_are_rounded_once(kept, computed, copy):
    path = copy / "model.safetensors"
    save_file({name: tensor.to(kept) for name, tensor in load_file(path).items()}, path)
    weights = load(copy, computed)
    name = "model.layers.0.mlp.down_proj.weight"
    want = load_file(path)[name].to(getattr(torch, computed))
    down = weights.layers[0].down
    assert down.weight.formats == [computed.format_name]
    assert same(down, want.float().numpy())
    assert (weights.dtype, weights.norm.dtype) == (computed, computed.numpy)


def test_tied_embeddings_are_one_matrix(folder, tmp_path):
    apart = load(folder)
    assert apart.lm_head is not apart.embedding
    tied = load(model_factory.make("llama", tmp_path))
    assert tied.lm_head is tied.embedding


def test_shards_equal_one_file(folder, tmp_path):
    sharded = model_factory.make("llama-biases", tmp_path, max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    one, many = load(folder), load(sharded, num_threads=2)
    assert same(one.embedding, numbers(many.embedding))
    for ours, theirs in zip(one.layers, many.layers, strict=True):
        assert same(ours.qkv, numbers(theirs.qkv))
        assert same(ours.down, numbers(theirs.down))


def test_progress_counts_every_byte_once(folder):
    seen: list[tuple[int, int]] = []
    load(folder, num_threads=2, progress=lambda done, total: seen.append((done, total)))
    num_bytes = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert seen[-1] == (num_bytes, num_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


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
        import resource
        from fastserve.models.checkpoint import Checkpoint
        from fastserve.models.resolve import resolve
        from fastserve.models.tensors import DType
        from fastserve.models.weights import Packing, load_weights
        source = resolve({str(folder)!r})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        checkpoint = Checkpoint.from_folder(source.path)
        weights = load_weights(checkpoint, source.config(), DType.FLOAT32,
                               packing=Packing.AS_COMPUTED, num_threads=2)
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


def test_loads_without_torch(folder):
    """SmolLM2, and a folder, in a process that cannot import it."""
    printed = run_python(
        f"""
        import sys
        sys.modules["torch"] = None
        from fastserve.models import checkpoint, dequant, packed, weights
        from fastserve.models.resolve import resolve
        from fastserve.models.tensors import DType
        smollm2, folder = resolve("smollm2"), resolve({str(folder)!r})
        for packing in weights.Packing:
            loaded = weights.load_weights(
                checkpoint.Checkpoint.from_gguf(smollm2.gguf), smollm2.config(), DType.FLOAT32,
                packing=packing, num_threads=2)
            print(loaded.embedding.weight.formats[0], loaded.num_bytes())
        for dtype in DType:
            loaded = weights.load_weights(
                checkpoint.Checkpoint.from_folder(folder.path), folder.config(), dtype,
                packing=weights.Packing.AS_COMPUTED)
            print(loaded.dtype, loaded.layers[0].down.weight.formats[0])
        """
    )
    assert printed.split() == [
        *("Q8_0", "96576768", "F32", "538060032"),
        *("I8", "136257792"),  # A byte a number and eight a row; 61 norms.
        *("Q8_0", "96576768"),  # As the file has it.
        *("float32", "F32", "bfloat16", "BF16"),
    ]


def test_a_broken_record_asks_for_no_memory(copy):
    """Refused by its shapes, of which the first would take 32 TiB."""
    settings = json.loads((copy / "config.json").read_text())
    settings |= {"vocab_size": 1 << 23, "hidden_size": 1 << 20}
    (copy / "config.json").write_text(json.dumps(settings))
    assert error_of(copy) == (
        "MODEL/model.safetensors: tensor model.embed_tokens.weight has shape [320, 64], the "
        "architecture wants [8388608, 1048576]"
    )


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
