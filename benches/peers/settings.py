"""How each engine is run, and how that was found.

Every peer has the settings with which it was fastest in trials on 2 cores of a Zen 5 (SmolLM2-135M,
two threads); what was tried is in `how`. Defaults are left alone where nothing better was found.

Engines on torch compute in bfloat16 where the processor has instructions for it, elsewhere in
float32 with the same weights: torch's bfloat16 product is several times slower there (seen with one
thread, 32 and 256 rows by 576 × 1,536, AVX2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ALL = ("W1", "W1S", "W2", "W3", "W4", "W5")
BATCHES = ("W1", "W1S", "W2", "W3")


@dataclass(frozen=True, slots=True)
class Setting:
    """Options of an engine for some workloads. One process runs what one setting covers.

    Attributes:
        options: For the adapter, beside model, precision and threads.
        workloads: What is run with them.
        how: How they were found, for documents.
        environment: Variables of the process.
    """

    options: dict[str, Any]
    workloads: tuple[str, ...]
    how: str
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine as it can be asked for with ``ENGINES=``.

    Attributes:
        name: As asked for.
        adapter: A key of ``worker.ENGINES``, and the name of its environment.
        precisions: What ``PRECISION=`` may be, and what the adapter and the models are told for it.
        settings: Together they cover the workloads that the engine can run.
    """

    name: str
    adapter: str
    precisions: dict[str, str]
    settings: tuple[Setting, ...]

    def setting(self, workload: str) -> Setting | None:
        """The one that covers a workload; ``None`` where the engine cannot run it."""
        return next((s for s in self.settings if workload in s.workloads), None)


_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_FASTSERVE = (Setting({}, ALL, "Defaults. The tokenizer is left out, as all peers' text is."),)

PEERS = {
    peer.name: peer
    for peer in (
        Peer("fastserve", "fastserve", {"bf16": "bf16", "int8": "int8"}, _FASTSERVE),
        Peer("fastserve-q8_0", "fastserve", {"int8": "q8_0"}, _FASTSERVE),
        Peer(
            "vllm",
            "vllm",
            {"bf16": "bf16"},
            (
                Setting(
                    {
                        "keywords": {
                            "max_model_len": 8192,
                            "max_num_seqs": 64,
                            "enable_prefix_caching": True,
                        }
                    },
                    ALL,
                    "2,048 batched tokens (the default) beats 512 in W4's TTFT, loses in its gap "
                    "(1.65 s against 0.52 s). Threads bound one to a core, none reserved. tcmalloc "
                    "and libiomp5 preloaded, as its guide asks.",
                    {
                        **_OFFLINE,
                        "VLLM_CPU_KVCACHE_SPACE": "4",
                        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                        "VLLM_NO_USAGE_STATS": "1",
                        "VLLM_LOGGING_LEVEL": "WARNING",
                    },
                ),
            ),
        ),
        Peer(
            "openvino",
            "openvino",
            {"bf16": "bf16", "int8": "int8"},
            (
                Setting(
                    {
                        "scheduler": {
                            "cache_size": 4,
                            "max_num_seqs": 64,
                            "enable_prefix_caching": True,
                        }
                    },
                    ALL,
                    "ContinuousBatchingPipeline, 256 batched tokens (the default). Weights are "
                    "exported as fp16 and computed in what the CPU plugin chooses: bf16 where the "
                    "processor has it. int8 is optimum's compression of weights.",
                ),
            ),
        ),
        Peer(
            "llama",
            "llama",
            {"bf16": "bf16", "int8": "q8_0"},
            (
                Setting(
                    {"arguments": ["-np", "16", "-c", "24576"]},
                    ("W1", "W1S", "W2", "W3", "W5"),
                    "16 slots beat 64 (197 against 134 tokens/s in W1). Built for the machine "
                    "(GGML_NATIVE). The context holds W1's longest request in each slot.",
                ),
                Setting(
                    {"arguments": ["-np", "9", "-c", "41472"]},
                    ("W4",),
                    "9 slots, each long enough for the prompt of 4,096.",
                ),
            ),
        ),
        Peer(
            "transformers",
            "transformers",
            {"bf16": "bf16"},
            (
                Setting(
                    {"batch_size": 16},
                    BATCHES,
                    "generate() in batches of 16 beats its own continuous batching (105 against 12 "
                    "tokens/s in W1). Batches cannot take W4 or W5.",
                    _OFFLINE,
                ),
            ),
        ),
    )
}
DEFAULT_ENGINES = {
    "bf16": ("fastserve", "vllm", "openvino", "llama", "transformers"),
    "int8": ("fastserve", "fastserve-q8_0", "openvino", "llama"),
}
