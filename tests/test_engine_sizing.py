"""How large the KV cache is where nobody says."""

from __future__ import annotations

import pytest

from fastserve.config import EngineConfig
from fastserve.errors import ConfigError
from fastserve.sizing import choose_num_blocks, core_keywords

MIB = 1 << 20


@pytest.mark.parametrize(
    ("available_mib", "max_num_seqs", "wanted"),
    [
        (4096, 4, 4 * 64),  # What four sequences of 1,024 tokens need.
        (4096, 128, 1024),  # A quarter of 4 GiB in blocks of 1 MiB.
        (4, 128, 1),
        (1 << 40, 1 << 20, (1 << 20) * 64),
    ],
)
def test_the_smaller_of_memory_and_need(available_mib: int, max_num_seqs: int, wanted: int) -> None:
    config = EngineConfig(max_num_seqs=max_num_seqs)
    assert choose_num_blocks(config, 1024, MIB, available_mib * MIB) == wanted


def test_a_slots_number_fits_the_plan() -> None:
    config = EngineConfig(max_num_seqs=1 << 20)
    assert choose_num_blocks(config, 1 << 17, MIB, 1 << 60) == (2**31 - 1) // 16


def test_no_room_for_a_block() -> None:
    with pytest.raises(ConfigError) as refusal:
        choose_num_blocks(EngineConfig(), 1024, 2 * MIB, 7 * MIB)
    assert str(refusal.value) == (
        "EngineConfig: num_blocks=None: 25% of the 7 MiB of memory available holds no block "
        "of 2048 KiB; free some memory, or set num_blocks"
    )


def test_what_was_asked_is_passed_on() -> None:
    config = EngineConfig(num_blocks=77, block_size=32, max_wait_s=None, max_chunk_tokens=5)
    keywords = core_keywords(config, max_positions=2048, vocab_size=500, kv_bytes_per_block=MIB)
    assert keywords["num_blocks"] == 77
    assert keywords["block_size"] == 32
    assert keywords["max_model_len"] == 2048
    assert keywords["vocab_size"] == 500
    assert keywords["max_wait_s"] is None
    assert keywords["max_chunk_tokens"] == 5
    shorter = EngineConfig(max_model_len=100, num_blocks=77)
    keywords = core_keywords(shorter, max_positions=2048, vocab_size=500, kv_bytes_per_block=MIB)
    assert keywords["max_model_len"] == 100


def test_the_default_fits_this_machine() -> None:
    keywords = core_keywords(
        EngineConfig(max_num_seqs=1), max_positions=64, vocab_size=500, kv_bytes_per_block=1024
    )
    assert keywords["num_blocks"] == 4
