"""From what the user asked and what the model needs to the sizes of the core."""

from __future__ import annotations

from typing import Any

from fastserve.config import EngineConfig
from fastserve.costs import StepCosts
from fastserve.errors import ConfigError
from fastserve.host import memory
from fastserve.sampling_record import MAX_RECORD_WORDS

__all__ = ["choose_num_blocks", "core_keywords"]

KV_MEMORY_SHARE = 0.25
"""Of the memory that is available, what the KV cache may take unless it is told a size."""

MAX_NUM_OUTPUT_ROWS = 256
"""Rows of logits a step computes: at a vocabulary of 128k a row takes half a megabyte."""


def core_keywords(
    config: EngineConfig,
    *,
    max_positions: int,
    vocab_size: int,
    kv_bytes_per_block: int,
    costs: StepCosts | None = None,
) -> dict[str, Any]:
    """The keywords of ``fastserve.core.Core``.

    Args:
        config: What the user asked.
        max_positions: The model's longest sequence.
        vocab_size: Token ids are below it.
        kv_bytes_per_block: Of all layers.
        costs: What a step takes, where ``target_itl_ms`` is to be kept.

    Raises:
        ConfigError: It does not fit the model or the memory.
    """
    max_model_len = max_positions if config.max_model_len is None else config.max_model_len
    if max_model_len > max_positions:
        raise ConfigError(
            "EngineConfig",
            [f"max_model_len={max_model_len}: want at most {max_positions}, the model's own limit"],
        )
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = choose_num_blocks(
            config, max_model_len, kv_bytes_per_block, memory().available_bytes
        )
    same = (
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_chunk_tokens",
        "long_prefill_threshold",
        "max_long_prefill_percent",
        "max_num_steps_in_flight",
        "enable_prefix_caching",
        "scheduling_policy",
        "max_wait_s",
        "max_num_queued_requests",
    )
    limits: dict[str, int] = {}
    if costs is not None and config.target_itl_ms is not None:
        limits = {
            "max_num_mixed_prefill_tokens": costs.max_prefill_tokens(config.target_itl_ms),
            "context_per_token": costs.context_per_token,
        }
    return {
        **limits,
        **{name: getattr(config, name) for name in same},
        "num_blocks": num_blocks,
        "max_model_len": max_model_len,
        "vocab_size": vocab_size,
        "max_num_output_rows": MAX_NUM_OUTPUT_ROWS,
        "max_sampling_words": MAX_RECORD_WORDS,
    }


def choose_num_blocks(
    config: EngineConfig, max_model_len: int, kv_bytes_per_block: int, available_bytes: int
) -> int:
    """Blocks of the KV cache where none were asked for.

    Raises:
        ConfigError: The memory has no room for a single block.
    """
    blocks_per_sequence = -(-max_model_len // config.block_size)
    wanted = config.max_num_seqs * blocks_per_sequence
    affordable = int(KV_MEMORY_SHARE * available_bytes) // kv_bytes_per_block
    if affordable < 1:
        raise ConfigError(
            "EngineConfig",
            [
                f"num_blocks=None: {KV_MEMORY_SHARE:.0%} of the {available_bytes >> 20} MiB of "
                f"memory available holds no block of {kv_bytes_per_block >> 10} KiB; free "
                "some memory, or set num_blocks"
            ],
        )
    # A slot's number has to fit the plan's 32-bit words.
    return min(wanted, affordable, (2**31 - 1) // config.block_size)
