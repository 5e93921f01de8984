"""The architecture record: everything that tells one supported decoder from another.

There is one decoder (``native.py``). What differs between Llama, Mistral, Qwen2 and Qwen3 is in
:class:`DecoderConfig`, which is filled from a ``config.json`` (``hf_config.py``) or from GGUF
metadata (``gguf_config.py``). Code that runs a model never asks for its family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from fastserve.errors import ModelError

SUPPORTED: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Families by the name that ``model_type`` and ``general.architecture`` give them."""

_LIMITS: Final = {
    "vocab_size": 1 << 23,  # What sampling takes.
    "hidden_size": 1 << 20,
    "num_layers": 1 << 12,
    "num_q_heads": 1 << 12,
    "num_kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "intermediate_size": 1 << 20,
    "max_positions": 1 << 30,
}
"""Beyond what any model has: a record outside is broken, and would ask for absurd memory."""

_RANGES: Final = {"norm_eps": (1e-30, 1), "attention_scale": (1e-6, 10**6)}
_ROPE_RANGES: Final[dict[str, tuple[float, float]]] = {
    "theta": (1, 10**15),
    "factor": (1e-3, 10**6),
    "low_freq_factor": (1e-3, 10**6),
    "high_freq_factor": (1e-3, 10**6),
    "original_max_positions": (1, 1 << 30),
}
"""Far beyond what any model has, and still numbers in float32 after all that is done with them."""

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

    def problems(self, keys: Mapping[str, str]) -> list[str]:
        """One sentence for each field that makes no sense, called as in `keys`."""
        limits = {name: (1, most) for name, most in _LIMITS.items()}
        bad = [
            f"{keys.get(name, name)}={getattr(record, name)}: want {low} to {high}"
            for record, ranges in ((self, limits | _RANGES), (self.rope, _ROPE_RANGES))
            for name, (low, high) in ranges.items()
            if not low <= getattr(record, name) <= high  # NaN is in no range.
        ]
        if self.num_kv_heads > 0 and self.num_q_heads % self.num_kv_heads:
            name, of = (keys.get(name, name) for name in ("num_kv_heads", "num_q_heads"))
            bad.append(f"{name}={self.num_kv_heads}: want a divisor of {of}, {self.num_q_heads}")
        if (
            self.rope.kind == "llama3"
            and not self.rope.low_freq_factor < self.rope.high_freq_factor
        ):
            bad.append(
                f"low_freq_factor={self.rope.low_freq_factor}: want less than "
                f"high_freq_factor={self.rope.high_freq_factor}"
            )
        if self.head_dim % 2:
            bad.append(f"head_dim={self.head_dim}: want an even number")
        if len(self.windows) != self.num_layers:
            bad.append(f"{len(self.windows)} layer types for num_layers={self.num_layers}")
        most = _LIMITS["max_positions"]
        bad += [
            f"{keys.get('windows', 'windows')}={window}: want 0 to {most}"
            for window in sorted(set(self.windows))
            if not 0 <= window <= most
        ]
        return bad


def checked(
    config: DecoderConfig, origin: str, keys: Mapping[str, str] = MappingProxyType({})
) -> DecoderConfig:
    """The configuration itself, once it makes sense.

    Args:
        config: To be checked.
        origin: Where it is from.
        keys: What `origin` calls fields that have another name there.

    Raises:
        ModelError: Names ``origin`` and every bad field.
    """
    bad = config.problems(keys)
    if bad:
        raise ModelError(f"{origin}: {'; '.join(bad)}")
    return config


def checked_layers(num_layers: int, origin: str, key: str) -> int:
    """The number of layers itself, before anything is made of that length."""
    most = _LIMITS["num_layers"]
    if not 1 <= num_layers <= most:
        raise ModelError(f"{origin}: {key}={num_layers}: want 1 to {most}")
    return num_layers


def usual_scale(head_dim: int) -> float:
    """1 / √head_dim. Of a size that :func:`checked` will refuse, some other number."""
    return float(min(max(head_dim, 1), _LIMITS["head_dim"]) ** -0.5)


def unsupported(origin: str, name: str) -> ModelError:
    """The error for an architecture that has no decoder here."""
    return ModelError(
        f"{origin}: architecture {name} is not supported; the supported ones are "
        f"{', '.join(SUPPORTED)}"
    )


def token_ids(value: object, origin: str, name: str, vocab_size: int) -> tuple[int, ...]:
    """A token id, a list of them or nothing, as a tuple without repeats."""
    found: Iterable[object] = value if isinstance(value, list | tuple) else (value,)
    ids: dict[int, None] = {}
    for token in found:
        if token is None:
            continue
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ModelError(f"{origin}: {name}={value!r}: want a token id or a list of them")
        if token >= vocab_size:
            raise ModelError(f"{origin}: {name}={value!r}: want less than vocab_size={vocab_size}")
        ids[token] = None
    return tuple(ids)
