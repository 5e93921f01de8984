"""A request's sampling parameters as int32 words.

The words are encoded once, when a request is submitted, and travel through the core unread, in the
event that gives the request a row slot. A sampler decodes them then
(``rust/cpu/src/sampling/record.rs``). Floats travel as their bits.

::

    word   0 version          6 presence penalty   12 logprobs wanted, -1 none
           1 temperature      7 frequency penalty  13 prompt logprobs wanted, -1 none
           2 top_p            8 repetition penalty 14 number of end tokens, E
           3 min_p            9 seed, low          15 number of biased tokens, B
           4 top_k (0: all)  10 seed, high         16 number of allowed tokens, A
           5 min_tokens      11 greedy (1) or not  17 reserved, 0
    then   E end tokens (masked before min_tokens), B biased tokens, B biases, A allowed tokens
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastserve.sampling_params import SamplingParams

__all__ = ["MAX_RECORD_WORDS", "RecordWord", "encode"]

Ints = NDArray[np.int32]

RECORD_VERSION: Final = 1
MAX_RECORD_WORDS: Final = 4096
"""What the core is told to expect at most; parameters at their limits take less."""


class RecordWord(IntEnum):
    """Places of the fixed part of a record."""

    VERSION = 0
    TEMPERATURE = 1
    TOP_P = 2
    MIN_P = 3
    TOP_K = 4
    MIN_TOKENS = 5
    PRESENCE_PENALTY = 6
    FREQUENCY_PENALTY = 7
    REPETITION_PENALTY = 8
    SEED_LOW = 9
    SEED_HIGH = 10
    GREEDY = 11
    NUM_LOGPROBS = 12
    NUM_PROMPT_LOGPROBS = 13
    NUM_END_TOKENS = 14
    NUM_BIASED = 15
    NUM_ALLOWED = 16


_FIXED_WORDS: Final = 18
_FLOATS: Final = {
    RecordWord.TEMPERATURE: "temperature",
    RecordWord.TOP_P: "top_p",
    RecordWord.MIN_P: "min_p",
    RecordWord.PRESENCE_PENALTY: "presence_penalty",
    RecordWord.FREQUENCY_PENALTY: "frequency_penalty",
    RecordWord.REPETITION_PENALTY: "repetition_penalty",
}


def encode(params: SamplingParams, seed: int, end_token_ids: Sequence[int]) -> Ints:
    """The record of a request.

    Args:
        params: What the client asked.
        seed: Of the noise: the client's, or the one derived for this request.
        end_token_ids: Every token that would end the sequence, so that ``min_tokens`` can mask it.
    """
    bias = params.logit_bias or {}
    allowed = params.allowed_token_ids or ()
    fixed = np.zeros(_FIXED_WORDS, dtype=np.int32)
    floats = fixed.view(np.float32)
    fixed[RecordWord.VERSION] = RECORD_VERSION
    for word, name in _FLOATS.items():
        floats[word] = getattr(params, name)
    # -1 and 0 both mean all; a sampler need only know one of them.
    fixed[RecordWord.TOP_K] = max(params.top_k, 0)
    fixed[RecordWord.MIN_TOKENS] = params.min_tokens
    words = fixed.view(np.uint32)
    words[RecordWord.SEED_LOW] = seed & 0xFFFFFFFF
    words[RecordWord.SEED_HIGH] = (seed >> 32) & 0xFFFFFFFF
    fixed[RecordWord.GREEDY] = params.greedy
    fixed[RecordWord.NUM_LOGPROBS] = -1 if params.logprobs is None else params.logprobs
    fixed[RecordWord.NUM_PROMPT_LOGPROBS] = (
        -1 if params.prompt_logprobs is None else params.prompt_logprobs
    )
    fixed[RecordWord.NUM_END_TOKENS] = len(end_token_ids)
    fixed[RecordWord.NUM_BIASED] = len(bias)
    fixed[RecordWord.NUM_ALLOWED] = len(allowed)
    return np.concatenate(
        [
            fixed,
            np.asarray(end_token_ids, dtype=np.int32),
            np.fromiter(bias.keys(), dtype=np.int32, count=len(bias)),
            np.fromiter(bias.values(), dtype=np.float32, count=len(bias)).view(np.int32),
            np.asarray(allowed, dtype=np.int32),
        ]
    )
