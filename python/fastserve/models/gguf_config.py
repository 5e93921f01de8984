"""The architecture record from GGUF metadata.

GGUF says less than a ``config.json``: that a projection has a bias, that heads are normed or that
the embeddings are tied shows only in which tensors there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastserve.errors import ModelError
from fastserve.models.config import (
    SUPPORTED,
    DecoderConfig,
    RopeConfig,
    checked,
    checked_layers,
    token_ids,
    unsupported,
    usual_scale,
)
from fastserve.models.gguf_file import GgufFile


def config_from_gguf(file: GgufFile) -> DecoderConfig:
    """Read the record of the model in ``file``.

    Raises:
        ModelError: A key is missing or of the wrong type, or the architecture is not supported.
    """
    origin = str(file.path)
    arch: str = file.get("general.architecture", str)
    if arch not in SUPPORTED:
        raise unsupported(origin, arch)
    num_experts = file.get(f"{arch}.expert_count", int, 0)
    if num_experts:
        raise unsupported(origin, f"{arch} with {num_experts} experts")

    key = f"{arch}.block_count"
    num_layers = checked_layers(file.get(key, int), origin, key)
    hidden_size: int = file.get(f"{arch}.embedding_length", int)
    num_q_heads = _same_in_every_layer(file, f"{arch}.attention.head_count", None)
    head_dim: int = file.get(
        f"{arch}.attention.key_length", int, hidden_size // max(num_q_heads, 1)
    )
    if file.get(f"{arch}.attention.value_length", int, head_dim) != head_dim:
        raise ModelError(f"{origin}: keys and values of different lengths are not supported")
    window = file.get(f"{arch}.attention.sliding_window", int, 0)
    scale = file.get(f"{arch}.attention.scale", float, 0.0)
    tensors = file.tensors
    vocab_size = _vocab_size(file)
    return checked(
        DecoderConfig(
            family=arch,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=_same_in_every_layer(file, f"{arch}.attention.head_count_kv", num_q_heads),
            head_dim=head_dim,
            intermediate_size=_same_in_every_layer(file, f"{arch}.feed_forward_length", None),
            norm_eps=file.get(f"{arch}.attention.layer_norm_rms_epsilon", float),
            rope=_rope(file, arch, head_dim),
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_down.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            windows=(window,) * num_layers,
            tied_embeddings="output.weight" not in tensors,
            attention_scale=scale or usual_scale(head_dim),
            max_positions=file.get(f"{arch}.context_length", int),
            eos_token_ids=token_ids(
                [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")],
                origin,
                "tokenizer.ggml.eos_token_id",
                vocab_size,
            ),
            bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        ),
        origin,
    )


def _same_in_every_layer(file: GgufFile, key: str, default: int | None) -> int:
    value: Any = file.metadata.get(key)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        sizes = sorted(set(value.tolist()))
        if len(sizes) != 1:
            raise ModelError(f"{file.path}: {key} differs between layers ({sizes}): not supported")
        return int(sizes[0])
    size: int = file.get(key, int, default)
    return size


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    if len(embedding.shape) != 2:
        raise ModelError(
            f"{file.path}: tensor token_embd.weight has shape {list(embedding.shape)}, the "
            "architecture wants two dimensions"
        )
    return embedding.shape[0]


def _rope(file: GgufFile, arch: str, head_dim: int) -> RopeConfig:
    rotary_dim = file.get(f"{arch}.rope.dimension_count", int, head_dim)
    if rotary_dim != head_dim:
        raise ModelError(
            f"{file.path}: {arch}.rope.dimension_count={rotary_dim} is not supported, want the "
            f"size of a head, {head_dim}"
        )
    theta = file.get(f"{arch}.rope.freq_base", float, 10_000.0)
    kind = file.get(f"{arch}.rope.scaling.type", str, "none")
    if kind == "none":
        # Llama 3's scaling comes as a tensor of divisors, rope_freqs.weight, and not as numbers.
        return RopeConfig(theta=theta)
    if kind != "linear":
        raise ModelError(
            f"{file.path}: rope scaling {kind!r} is not supported; the supported ones are none and "
            "linear"
        )
    factor = file.get(f"{arch}.rope.scaling.factor", float)
    return RopeConfig(theta=theta, kind="linear", factor=factor)
