"""The architecture record from a Hugging Face folder: ``config.json``, ``generation_config.json``.

Both spellings of the position embedding are read: ``rope_parameters`` (transformers 5) and
``rope_theta`` with ``rope_scaling`` (before). What is not supported is refused by name and never
ignored. Where a field is missing, transformers' default for the class holds.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from fastserve.errors import ModelError
from fastserve.models.config import (
    ROPE_KINDS,
    DecoderConfig,
    RopeConfig,
    checked,
    checked_layers,
    token_ids,
    unsupported,
    usual_scale,
)

_CLASSES: Final = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


# The record's names, where a config.json has others.
_KEYS: Final = {
    "num_layers": "num_hidden_layers",
    "num_q_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "windows": "sliding_window",
    "theta": "rope_theta",
    "original_max_positions": "original_max_position_embeddings",
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelError: The file is missing or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: want a JSON object, found {type(value).__name__}")
    return value


def config_from_folder(folder: Path) -> DecoderConfig:
    """Read the record of the model in ``folder``.

    Raises:
        ModelError: A file is missing or broken, or the architecture is not supported.
    """
    path = folder / "config.json"
    fields = _Fields(read_json(path), str(path))
    family = _family(fields)
    key = "num_hidden_layers"
    num_layers = checked_layers(fields.integer(key), str(path), key)
    vocab_size = fields.integer("vocab_size")
    num_q_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden_size // max(num_q_heads, 1))
    attention_bias = fields.flag("attention_bias") if family in ("llama", "qwen3") else False
    return checked(
        DecoderConfig(
            family=family,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_q_heads),
            head_dim=head_dim,
            intermediate_size=fields.integer("intermediate_size"),
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=_rope(fields),
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=attention_bias,
            mlp_bias=family == "llama" and fields.flag("mlp_bias"),
            qk_norm=family == "qwen3",
            windows=_windows(fields, family, num_layers),
            tied_embeddings=fields.flag("tie_word_embeddings"),
            attention_scale=usual_scale(head_dim),
            max_positions=fields.integer("max_position_embeddings"),
            eos_token_ids=_eos_token_ids(folder, fields, vocab_size),
            bos_token_id=fields.optional("bos_token_id", int),
        ),
        str(path),
        _KEYS,
    )


class _Fields:
    """Values of a ``config.json`` by name, with their types checked."""

    def __init__(self, values: dict[str, Any], origin: str) -> None:
        self.values = values
        self.origin = origin

    def optional(self, name: str, *kinds: type) -> Any:
        value = self.values.get(name)
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            want = " or ".join(kind.__name__ for kind in kinds)
            raise ModelError(f"{self.origin}: {name}={value!r}: want {want}")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value: int | None = self.optional(name, int)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.origin}: {name} is missing")
        return value

    def number(self, name: str, default: float) -> float:
        value: float | None = self.optional(name, int, float)
        try:
            return default if value is None else float(value)
        except OverflowError:
            return math.inf

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if value not in (None, True, False):
            raise ModelError(f"{self.origin}: {name}={value!r}: want true or false")
        return bool(value)


def _family(fields: _Fields) -> str:
    names = fields.values.get("architectures")
    if not names:
        names = [fields.optional("model_type", str) or "(unnamed)"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ModelError(f"{fields.origin}: architectures={names!r}: want a list of class names")
    name = names[0]
    family = _CLASSES.get(name) or (name if name in _CLASSES.values() else None)
    if family is None:
        raise unsupported(fields.origin, name)
    activation = fields.values.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(
            f"{fields.origin}: hidden_act={activation!r} is not supported, only 'silu'"
        )
    quantization = fields.values.get("quantization_config")
    if quantization:
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        )
        raise ModelError(
            f"{fields.origin}: weights quantized with {method!r} are not supported; take the "
            "original checkpoint or a GGUF file"
        )
    return family


def _rope(fields: _Fields) -> RopeConfig:
    given = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ModelError(f"{fields.origin}: rope_parameters={given!r}: want an object")
    scaling = _Fields(given, f"{fields.origin}: rope")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ModelError(
            f"{fields.origin}: rope_type={kind!r} is not supported; the supported ones are "
            f"{', '.join(ROPE_KINDS)}"
        )
    partial = given.get("partial_rotary_factor", fields.values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"{fields.origin}: partial_rotary_factor={partial!r} is not supported")
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    wanted = ["factor"]
    if kind == "llama3":
        wanted += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    missing = [name for name in wanted if given.get(name) is None]
    if missing:
        raise ModelError(f"{fields.origin}: rope_type={kind!r} without {', '.join(missing)}")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=scaling.number("factor", 1.0),
        low_freq_factor=scaling.number("low_freq_factor", 1.0),
        high_freq_factor=scaling.number("high_freq_factor", 4.0),
        original_max_positions=scaling.integer("original_max_position_embeddings", 8192),
    )


def _windows(fields: _Fields, family: str, num_layers: int) -> tuple[int, ...]:
    """Each layer's attention window. Qwen uses one only if told to, and only in some layers."""
    missing = "sliding_window" not in fields.values
    window = 4096 if missing else fields.optional("sliding_window", int)
    if family == "llama" or not window:
        return (0,) * num_layers
    if family == "mistral":
        return (window,) * num_layers
    if not fields.flag("use_sliding_window"):
        return (0,) * num_layers
    types = fields.optional("layer_types", list)
    if types is None:
        first = fields.integer("max_window_layers", 28)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    known = {"full_attention": 0, "sliding_attention": window}
    unknown = sorted({str(name) for name in types} - known.keys())
    if unknown:
        raise ModelError(f"{fields.origin}: layer_types {', '.join(unknown)} are not supported")
    return tuple(known[name] for name in types)


def _eos_token_ids(folder: Path, fields: _Fields, vocab_size: int) -> tuple[int, ...]:
    """``generation_config.json`` decides, as it does in transformers; else ``config.json``."""
    path = folder / "generation_config.json"
    if path.exists():
        given = read_json(path).get("eos_token_id")
        ids = token_ids(given, str(path), "eos_token_id", vocab_size)
        if ids:
            return ids
    given = fields.values.get("eos_token_id")
    return token_ids(given, fields.origin, "eos_token_id", vocab_size)
