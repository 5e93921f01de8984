"""An unknown keyword is an error that names it and the nearest known one, or why it is not here."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

__all__ = ["names_unknown_keywords", "nearest", "unknown_keyword", "why_not_here"]

Class = TypeVar("Class", bound=type)


# vLLM's keywords that have no meaning here yet, in groups that share a reason.
_NOT_HERE: Final = {
    "it runs on the CPU; num_blocks sizes the KV cache": (
        *("gpu_memory_utilization", "kv_cache_memory_bytes", "swap_space", "cpu_offload_gb"),
    ),
    "it runs on the CPU, in one process": (
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
        *("distributed_executor_backend", "device", "enforce_eager", "compilation_config"),
    ),
    "a model's own code is never run; leave it out": ("trust_remote_code",),
    "prompts are always computed in chunks; max_chunk_tokens limits them": (
        "enable_chunked_prefill",
    ),
    "the tokenizer is the model's own": ("tokenizer", "tokenizer_mode", "tokenizer_revision"),
    "the server has no keys yet; keep it on 127.0.0.1 or behind a proxy": ("api_key",),
    "not supported yet": (
        *("revision", "download_dir", "load_format", "hf_overrides", "hf_token"),
        *("enable_lora", "max_loras", "lora_modules", "speculative_config", "limit_mm_per_prompt"),
        *("chat_template", "generation_config", "rope_scaling", "tool_call_parser"),
        *("structured_outputs", "guided_decoding", "logits_processors", "bad_words", "best_of"),
        *("use_beam_search", "truncate_prompt_tokens", "ssl_keyfile", "ssl_certfile"),
    ),
}


def why_not_here(name: str) -> str | None:
    """Why a keyword that vLLM's users know is not taken; ``None`` for any other."""
    return next((reason for reason, names in _NOT_HERE.items() if name in names), None)


def unknown_keyword(where: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for keyword `name`, which `where` does not take."""
    if reason := why_not_here(name):
        return TypeError(f"{where} has no keyword {name!r}: {reason}")
    known = sorted(known)
    near = nearest(name, known)
    remedy = f"known: {', '.join(known)}" if near is None else f"did you mean {near!r}?"
    return TypeError(f"{where} has no keyword {name!r}; {remedy}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `name` may have been meant for."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)), None)


def names_unknown_keywords(decorated: Class) -> Class:
    """Let a class with keyword-only parameters refuse others with :func:`unknown_keyword`."""
    init: Callable[..., None] = vars(decorated)["__init__"]
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **keywords: Any) -> None:
        for name in keywords:
            if name not in known:
                raise unknown_keyword(decorated.__name__, name, known)
        init(self, *args, **keywords)

    type.__setattr__(decorated, "__init__", checked)
    return decorated
