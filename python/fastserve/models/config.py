"""The architecture record: everything that tells one supported decoder from another.

There is one decoder (``decoder.py``), written once. What differs between Llama, Mistral, Qwen2
and Qwen3 is in :class:`DecoderConfig`, which is filled from a ``config.json`` (``hf_config.py``) or
from GGUF metadata (``gguf_config.py``). Code that runs a model never asks for its family.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from fastserve.errors import ModelError

SUPPORTED: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Families by the name that ``model_type`` and ``general.architecture`` give them."""

_LIMITS: Final = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_layers": 1 << 12,
    "num_q_heads": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "intermediate_size": 1 << 20,
    "max_positions": 1 << 30,
}
"""Beyond what any model has: a record outside is broken, and would ask for absurd memory."""

RopeKind: TypeAlias = Literal["default", "linear", "llama3"]
ROPE_KINDS: Final[tuple[RopeKind, ...]] = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, in the half-rotation ("NeoX") order of dimensions.

    Attributes:
        theta: Base of the wavelengths.
        kind: ``default``; ``linear`` (all positions divided by ``factor``); ``llama3`` (long
            wavelengths divided, short ones kept, a ramp between).
        factor: How much longer the context is than the original one.
        low_freq_factor: ``llama3``: a wavelength above the original context / this is divided.
        high_freq_factor: ``llama3``: a wavelength below the original context / this is kept.
        original_max_positions: ``llama3``: the original context, in tokens.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """One decoder-only transformer.

    Attributes:
        family: One of :data:`SUPPORTED`; for messages, nothing branches on it.
        vocab_size: Rows of the embedding. May be more than the tokenizer uses.
        hidden_size: Width of the residual stream.
        num_layers: Decoder layers.
        num_q_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_q_heads``.
        head_dim: Size of a head.
        intermediate_size: Width of the gated MLP.
        norm_eps: Added to the mean square in RMSNorm.
        rope: Position embedding.
        qkv_bias: Query, key and value projections have biases.
        output_bias: The attention's output projection has a bias.
        mlp_bias: The MLP's projections have biases.
        qk_norm: RMSNorm of each query and key head before the position embedding.
        windows: For each layer, how many tokens attention sees, the current one included; 0: all.
        tied_embeddings: The LM head is the embedding.
        attention_scale: Factor of the attention scores.
        max_positions: Longest sequence.
        eos_token_ids: Tokens that end a sequence.
        bos_token_id: Token that begins one, if there is one.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    tied_embeddings: bool
    attention_scale: float
    max_positions: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads; of all value heads too."""
        return self.num_kv_heads * self.head_dim

    def problems(self) -> list[str]:
        """One sentence for each field that makes no sense."""
        bad = [
            f"{name}={getattr(self, name)}: want 1 to {most}"
            for name, most in _LIMITS.items()
            if not 1 <= getattr(self, name) <= most
        ]
        if self.num_kv_heads > 0 and self.num_q_heads % self.num_kv_heads:
            bad.append(
                f"num_kv_heads={self.num_kv_heads}: want a divisor of num_q_heads, "
                f"{self.num_q_heads}"
            )
        if self.head_dim % 2:
            bad.append(f"head_dim={self.head_dim}: want an even number")
        if len(self.windows) != self.num_layers:
            bad.append(f"{len(self.windows)} layer types for num_layers={self.num_layers}")
        if any(window < 0 for window in self.windows):
            bad.append(f"windows={self.windows}: want 0 or more")
        return bad


def checked(config: DecoderConfig, origin: str) -> DecoderConfig:
    """The configuration itself, once it makes sense.

    Raises:
        ModelError: Names ``origin`` and every bad field.
    """
    bad = config.problems()
    if bad:
        raise ModelError(f"{origin}: {'; '.join(bad)}")
    return config


def checked_layers(num_layers: int, origin: str) -> int:
    """The number of layers itself, before anything is made of that length."""
    most = _LIMITS["num_layers"]
    if not 1 <= num_layers <= most:
        raise ModelError(f"{origin}: num_layers={num_layers}: want 1 to {most}")
    return num_layers


def unsupported(origin: str, name: str) -> ModelError:
    """The error for an architecture that has no decoder here."""
    return ModelError(
        f"{origin}: architecture {name} is not supported; the supported ones are "
        f"{', '.join(SUPPORTED)}"
    )


def token_ids(value: object, origin: str, name: str) -> tuple[int, ...]:
    """A token id, a list of them or nothing, as a tuple without repeats."""
    found: Iterable[object] = value if isinstance(value, list | tuple) else (value,)
    ids: dict[int, None] = {}
    for token in found:
        if token is None:
            continue
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ModelError(f"{origin}: {name}={value!r}: want a token id or a list of them")
        ids[token] = None
    return tuple(ids)
