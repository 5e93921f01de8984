"""Small GGUF files, made from a Hugging Face folder the way llama.cpp's converter does it.

``quantise`` names the format of every matrix. The ``gguf`` package can quantise the simple formats;
for Q4_K and Q6_K, whose quantisers it lacks, blocks are filled with random bits and sensible
scales, which any reader must still agree about.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def convert(
    folder: Path,
    path: Path,
    quantise: str = "F32",
    *,
    arch: str | None = None,
    metadata: dict[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write the model in ``folder`` as GGUF to ``path``.

    Args:
        folder: Hugging Face folder.
        path: The file.
        quantise: Format of the matrices; vectors stay F32.
        arch: Another architecture than the folder's.
        metadata: Keys to change or add; ``None`` as a value leaves the key out.
        leave_out: Tensors to leave out.
        extra: Tensors to add.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = arch or {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    changes = metadata or {}
    keys = _metadata(folder, config, arch) | changes
    for key, value in keys.items():
        if value is not None and key != "general.architecture":
            _add(writer, key, value)
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    rng = np.random.default_rng(0)
    for name, weight in sorted(load_file(folder / "model.safetensors").items()):
        spelled = _spell(name)
        if spelled in leave_out or (name == "lm_head.weight" and config["tie_word_embeddings"]):
            continue
        values = weight.astype(np.float32)
        which = spelled.rsplit(".", 2)[-2].removeprefix("attn_")
        if arch == "llama" and which in heads:
            values = interleave(values, heads[which])
        if values.ndim == 1:
            writer.add_tensor(spelled, values)
            continue
        kind = gguf.GGMLQuantizationType[quantise]
        raw = random_blocks(rng, values.shape, kind) if quantise in ("Q4_K", "Q6_K") else None
        writer.add_tensor(
            spelled, gguf.quantize(values, kind) if raw is None else raw, raw_dtype=kind
        )
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows i and i + d/2 of a head become rows 2i and 2i + 1, as llama.cpp wants them."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def random_blocks(
    rng: np.random.Generator, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType
) -> np.ndarray:
    """Blocks of Q4_K or Q6_K with random quants and scales of a weight's usual size."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, num_bytes), dtype=np.uint8)
    where = {"Q4_K": (0, 2), "Q6_K": (208,)}[kind.name]
    for start in where:
        scales = rng.uniform(1e-4, 3e-4, blocks.shape[:-1]).astype(np.float16)
        blocks[..., start : start + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _spell(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    layer, kind = name.removeprefix("model.layers.").split(".", 1)
    stem, role = kind.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER[stem]}.{role}"


def _metadata(folder: Path, config: dict[str, Any], arch: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    keys = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.vocab_size": config["vocab_size"],
    }
    return keys | tokenizer_metadata(folder)


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """The keys of a byte-level tokenizer, from ``tokenizer.json``."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab[settings["bos_token"]],
        "tokenizer.ggml.eos_token_id": vocab[settings["eos_token"]],
        "tokenizer.ggml.add_bos_token": False,
    }
    if "chat_template" in settings:
        keys["tokenizer.chat_template"] = settings["chat_template"]
    return keys


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
