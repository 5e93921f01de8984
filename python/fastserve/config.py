"""Everything an engine can be told, checked when it is made.

The names are vLLM's where the meaning is the same; each is a keyword of ``LLM`` and ``AsyncEngine``
and, with dashes, a flag of the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from fastserve.errors import ConfigError
from fastserve.keywords import names_unknown_keywords, unknown_keyword

__all__ = ["EngineConfig", "EngineOptions"]

BLOCK_SIZES = (8, 16, 32)
DTYPES = ("auto", "float32", "bfloat16")
KV_CACHE_DTYPES = (*DTYPES, "int8")
QUANTIZATIONS = (None, "int8", "int4")
SCHEDULING_POLICIES = ("fcfs", "priority")


@names_unknown_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a model is run.

    Attributes:
        dtype: What is computed in. ``float32`` and ``bfloat16`` convert the weights when they are
            loaded; ``auto`` computes with the file's own format where there is a kernel for it.
        quantization: ``int8`` makes weights int8 when they are loaded, with a scale for each
            output, whatever the file has; activations are quantized as they come, row by row, and
            dtype says what they are otherwise. ``int4`` makes them four bits in groups of 32, and
            the embedding and the output layer eight; activations stay. By default weights are what
            dtype says.
        kv_cache_dtype: What keys and values are kept in; ``auto`` is what is computed in. ``int8``,
            with a scale per token and head, takes a bit over a quarter of the memory of ``float32``
            and moves results a little.
        max_model_len: Longest sequence, prompt and output. By default the model's own limit.
        max_num_batched_tokens: Tokens a step may compute, over all sequences.
        max_num_seqs: Sequences that run at once.
        max_chunk_tokens: Tokens of one prompt that a step may compute; by default all it has room
            for.
        long_prefill_threshold: A prompt with more tokens to compute than this is long.
        max_long_prefill_percent: Share of a step that all long prompts together may take.
        target_itl_ms: Milliseconds that streams should wait for their next token at most while
            prompts are computed. The prompt tokens of a step beside streams are limited to it, as
            far as a measurement at the start can tell, but not below 32. None: no limit.
        block_size: Tokens per block of the KV cache: 8, 16 or 32.
        num_blocks: Blocks in the KV cache. By default the smaller of 25 % of the memory that is
            available, container limits respected, and what ``max_num_seqs`` full sequences need.
        enable_prefix_caching: Keep blocks of finished requests for prompts that begin the same.
        scheduling_policy: ``fcfs``: first come, first served. ``priority``: lower numbers first.
        max_wait_s: After so long a waiting request goes ahead of all that came later, whatever the
            policy. None turns that off, and a wait then has no bound.
        max_num_steps_in_flight: Steps planned before the one before them is done: 1, or 2 where the
            device works on its own.
        max_num_queued_requests: Requests that may wait; more are refused.
        skip_tokenizer_init: Do without the model's tokenizer: prompts are token ids, and answers
            have no text.
        num_threads: Threads that compute, by default one for each core that may be used.
        seed: Of the requests that bring none. The same seed and the same order of requests give the
            same tokens.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    quantization: Literal["int8", "int4"] | None = None
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_chunk_tokens: int | None = None
    long_prefill_threshold: int | None = None
    max_long_prefill_percent: int = 100
    target_itl_ms: float | None = 60.0
    block_size: int = 16
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    max_wait_s: float | None = 30.0
    max_num_steps_in_flight: int = 1
    max_num_queued_requests: int = 4096
    skip_tokenizer_init: bool = False
    num_threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        bad: list[str] = []

        def choice(name: str, known: tuple[object, ...]) -> None:
            value = getattr(self, name)
            if value not in known or isinstance(value, bool):
                bad.append(f"{name}={value!r}: want {', '.join(map(repr, known))}")

        def count(name: str, low: int = 1, high: int = 2**30, *, optional: bool = False) -> None:
            value = getattr(self, name)
            if value is None and optional:
                return
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if not is_int or not low <= value <= high:
                remedy = ", or None for the default" if optional else ""
                bad.append(f"{name}={value!r}: want {low} to {high}{remedy}")

        choice("dtype", DTYPES)
        choice("quantization", QUANTIZATIONS)
        choice("kv_cache_dtype", KV_CACHE_DTYPES)
        choice("block_size", BLOCK_SIZES)
        choice("scheduling_policy", SCHEDULING_POLICIES)
        bad += [
            f"{name}={getattr(self, name)!r}: want True or False"
            for name in ("enable_prefix_caching", "skip_tokenizer_init")
            if not isinstance(getattr(self, name), bool)
        ]
        for name in ("max_num_batched_tokens", "max_num_queued_requests"):
            count(name)
        count("max_num_seqs", high=2**20)
        for name in ("max_model_len", "max_chunk_tokens", "long_prefill_threshold", "num_blocks"):
            count(name, optional=True)
        count("max_long_prefill_percent", high=100)
        count("max_num_steps_in_flight", high=8)
        count("num_threads", high=1024, optional=True)
        count("seed", low=0, high=2**64 - 1)
        for name, want, remedy in (
            ("max_wait_s", "0 to 1e9 seconds", "no bound"),
            ("target_itl_ms", "0 to 1e9 milliseconds", "no limit"),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0.0 <= value <= 1e9):
                bad.append(f"{name}={value!r}: want {want}, or None for {remedy}")
        if bad:
            raise ConfigError("EngineConfig", bad)

    @classmethod
    def from_keywords(cls, owner: str, keywords: dict[str, Any]) -> EngineConfig:
        """Make one from the keywords that `owner` was given.

        Raises:
            ConfigError: Names every bad value.
            TypeError: Names a keyword that is not known, and the nearest that is.
        """
        known = [field.name for field in fields(cls)]
        for name in keywords:
            if name not in known:
                raise unknown_keyword(owner, name, known)
        return cls(**keywords)


class EngineOptions(TypedDict, total=False):
    """The fields of :class:`EngineConfig` as keywords, for type checkers."""

    dtype: Literal["auto", "float32", "bfloat16"]
    quantization: Literal["int8", "int4"] | None
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8"]
    max_model_len: int | None
    max_num_batched_tokens: int
    max_num_seqs: int
    max_chunk_tokens: int | None
    long_prefill_threshold: int | None
    max_long_prefill_percent: int
    target_itl_ms: float | None
    block_size: int
    num_blocks: int | None
    enable_prefix_caching: bool
    scheduling_policy: Literal["fcfs", "priority"]
    max_wait_s: float | None
    max_num_steps_in_flight: int
    max_num_queued_requests: int
    skip_tokenizer_init: bool
    num_threads: int | None
    seed: int
