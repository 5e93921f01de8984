"""A request's sampling parameters as int32 words, and what a sampler keeps of them per row slot.

The words are encoded once, when a request is submitted, and travel through the core unread, in the
event that gives the request a row slot. A sampler decodes them into arrays indexed by slot, so that
a step needs no Python object per sequence. Floats travel as their bits.

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

__all__ = ["MAX_RECORD_WORDS", "RecordWord", "SlotStates", "encode"]

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

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


class SlotStates:
    """Decoded records, a place per row slot. Arrays are indexed by slot.

    Attributes:
        adjusts: Whether logits change in any way before the best one is sought.
        penalized: Whether any of the three penalties is on.
        request_ids: Whose slot it is.
        sequence_indices: Which of that request's sequences.
        num_prompt_tokens: Where its output begins.
        end_tokens: Tokens to mask before ``min_tokens``, for slots that have some.
        biases: Token ids and what is added to them, for slots that have some.
        allowed: The only tokens to take, for slots that name them.
    """

    def __init__(self, max_num_seqs: int) -> None:
        def ints() -> Ints:
            return np.zeros(max_num_seqs, dtype=np.int32)

        def floats() -> Floats:
            return np.zeros(max_num_seqs, dtype=np.float32)

        self.temperature, self.top_p, self.min_p = floats(), floats(), floats()
        self.presence_penalty, self.frequency_penalty = floats(), floats()
        self.repetition_penalty = floats()
        self.top_k, self.min_tokens = ints(), ints()
        self.num_logprobs, self.num_prompt_logprobs = ints(), ints()
        self.sequence_indices, self.num_prompt_tokens = ints(), ints()
        self.seeds: NDArray[np.uint64] = np.zeros(max_num_seqs, dtype=np.uint64)
        self.request_ids: NDArray[np.uint64] = np.zeros(max_num_seqs, dtype=np.uint64)
        self.greedy: NDArray[np.bool_] = np.ones(max_num_seqs, dtype=np.bool_)
        self.adjusts: NDArray[np.bool_] = np.zeros(max_num_seqs, dtype=np.bool_)
        self.penalized: NDArray[np.bool_] = np.zeros(max_num_seqs, dtype=np.bool_)
        self.end_tokens: dict[int, Ints] = {}
        self.biases: dict[int, tuple[Ints, Floats]] = {}
        self.allowed: dict[int, Ints] = {}

    def assign(
        self, slot: int, request_id: int, index: int, num_prompt_tokens: int, record: Ints
    ) -> None:
        """Take over `slot` for a sequence. `record` is read and not kept."""
        self.release(slot)
        if record[RecordWord.VERSION] != RECORD_VERSION:
            raise ValueError(
                f"sampling record version {record[RecordWord.VERSION]}, want {RECORD_VERSION}; "
                "encode it with fastserve.sampling_record.encode"
            )
        floats = record[:_FIXED_WORDS].view(np.float32)
        for word, name in _FLOATS.items():
            getattr(self, name)[slot] = floats[word]
        seed = record[:_FIXED_WORDS].view(np.uint32)[[RecordWord.SEED_LOW, RecordWord.SEED_HIGH]]
        self.seeds[slot] = int(seed[0]) | int(seed[1]) << 32
        self.request_ids[slot] = request_id
        self.sequence_indices[slot] = index
        self.num_prompt_tokens[slot] = num_prompt_tokens
        self.top_k[slot] = record[RecordWord.TOP_K]
        self.min_tokens[slot] = record[RecordWord.MIN_TOKENS]
        self.num_logprobs[slot] = record[RecordWord.NUM_LOGPROBS]
        self.num_prompt_logprobs[slot] = record[RecordWord.NUM_PROMPT_LOGPROBS]
        self.greedy[slot] = record[RecordWord.GREEDY] != 0
        self._assign_lists(slot, record)
        self.penalized[slot] = (
            self.presence_penalty[slot] != 0
            or self.frequency_penalty[slot] != 0
            or self.repetition_penalty[slot] != 1
        )
        self.adjusts[slot] = (
            self.penalized[slot]
            or slot in self.biases
            or slot in self.allowed
            or (self.min_tokens[slot] > 0 and slot in self.end_tokens)
        )

    def _assign_lists(self, slot: int, record: Ints) -> None:
        num_end, num_biased, num_allowed = (
            int(record[word])
            for word in (RecordWord.NUM_END_TOKENS, RecordWord.NUM_BIASED, RecordWord.NUM_ALLOWED)
        )
        lengths = (num_end, num_biased, num_biased, num_allowed)
        starts = np.cumsum((_FIXED_WORDS, *lengths))
        end, tokens, amounts, allowed = (
            record[start : start + length].copy()
            for start, length in zip(starts, lengths, strict=False)
        )
        if num_end:
            self.end_tokens[slot] = end
        if num_biased:
            self.biases[slot] = tokens, amounts.view(np.float32)
        if num_allowed:
            self.allowed[slot] = allowed

    def release(self, slot: int) -> None:
        """Forget what `slot` held."""
        self.adjusts[slot] = self.penalized[slot] = False
        self.greedy[slot] = True
        for held in (self.end_tokens, self.biases, self.allowed):
            held.pop(slot, None)
