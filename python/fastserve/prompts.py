"""What callers may give as a prompt, and what becomes of it.

A prompt is text, a list of token ids, or a dict with ``prompt`` or ``prompt_token_ids`` and perhaps
a ``cache_salt``: prompts of different salts never share cached blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastserve.keywords import unknown_keyword
from fastserve.sampling_params import ParameterError, SamplingParams
from fastserve.surrogates import half_pair

__all__ = ["Prompt", "Prompts", "TokenizedPrompt", "as_list", "as_sampling_params", "tokenize"]

TokenIds: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class Encoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, special tokens included."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the engine takes it.

    Attributes:
        text: ``None`` where it came as token ids.
        token_ids: As the model sees it.
        namespace: Who may share its blocks; 0 is everybody without a salt.
    """

    text: str | None
    token_ids: list[int]
    namespace: int


Prompt: TypeAlias = str | TokenIds | Mapping[str, Any] | TokenizedPrompt
Prompts: TypeAlias = Prompt | Sequence[Prompt]


def as_list(prompts: Prompts) -> list[Prompt]:
    """One prompt or many, as many."""
    given: Any = prompts
    if isinstance(given, str | Mapping | np.ndarray | TokenizedPrompt):
        return [given]
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise TypeError(
            f"prompts is a {type(given).__name__}; want text, token ids, a dict with "
            "'prompt' or 'prompt_token_ids', or a list of these"
        )
    if len(given) > 0 and isinstance(given[0], int | np.integer):
        return [given]
    return list(given)


def as_sampling_params(given: SamplingParams | None) -> SamplingParams:
    """What was given, or every default.

    Raises:
        TypeError: It is something else, such as a dict.
    """
    if given is None:
        return SamplingParams()
    value: Any = given
    if not isinstance(value, SamplingParams):
        remedy = "SamplingParams(**it)" if isinstance(value, Mapping) else "SamplingParams(...)"
        raise TypeError(f"sampling_params is a {type(value).__name__}; want {remedy}")
    return value


def tokenize(prompt: Prompt, tokenizer: Encoder | None) -> TokenizedPrompt:
    """Turn a prompt into tokens, unless that was done.

    Raises:
        TypeError: It is nothing that a prompt can be.
        ParameterError: It is text and the model has no tokenizer.
    """
    if isinstance(prompt, TokenizedPrompt):
        return prompt
    namespace = 0
    if isinstance(prompt, Mapping):
        prompt, namespace = _unpack(prompt)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ParameterError(["prompt is text: want token ids, the model has no tokenizer"])
        return TokenizedPrompt(prompt, tokenizer.encode(prompt), namespace)
    return TokenizedPrompt(None, _token_ids(prompt), namespace)


def _token_ids(prompt: Any) -> list[int]:
    """A list of integers of any kind as Python's; whether the model has them is the core's say."""
    if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes):
        raise TypeError(
            f"prompt is a {type(prompt).__name__}; want text, token ids, or a dict with "
            "'prompt' or 'prompt_token_ids'"
        )
    if len(prompt) > 0 and isinstance(prompt[0], str | Mapping | Sequence):
        raise TypeError(
            f"prompt is a list of {type(prompt[0]).__name__}; want one prompt: make one request "
            "for each, or give the list to LLM.generate"
        )
    for token in prompt:
        if not isinstance(token, int | np.integer) or isinstance(token, bool):
            raise TypeError(f"prompt has {token!r} among its token ids; want integers")
    return [int(token) for token in prompt]


def _unpack(prompt: Mapping[str, Any]) -> tuple[Any, int]:
    """Text or token ids of a dict, and the namespace of its salt."""
    for key in prompt:
        if key not in _KEYS:
            raise unknown_keyword("a prompt", key, _KEYS)
    given = [key for key in _KEYS[:2] if prompt.get(key) is not None]
    if len(given) != 1:
        raise TypeError(
            f"a prompt's dict has {' and '.join(given) or 'neither'}; want one of 'prompt' and "
            "'prompt_token_ids'"
        )
    salt = prompt.get("cache_salt")
    if salt is None:
        return prompt[given[0]], 0
    if not isinstance(salt, str) or not salt:
        raise TypeError(f"cache_salt is {salt!r}; want text that is not empty, or None")
    if (half := half_pair(salt)) is not None:
        problem = f"cache_salt has {half[0]!a} at character {half.start()}"
        raise ParameterError([f"{problem}: want both halves of a surrogate pair"])
    digest = hashlib.blake2b(salt.encode(), digest_size=16).digest()
    return prompt[given[0]], int.from_bytes(digest, "little")
