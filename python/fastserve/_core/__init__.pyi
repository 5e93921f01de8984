from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias, TypedDict, final, type_check_only

import numpy as np
from numpy.typing import NDArray

from fastserve.errors import ConfigError as ConfigError
from fastserve.errors import FastserveError

from . import cpu as cpu
from . import text as text

__all__ = [
    "COPY_WORDS",
    "CORE_DEFAULTS",
    "DISTRIBUTION",
    "FINISH_REASONS",
    "HEADER",
    "HEADER_WORDS",
    "PLAN_VERSION",
    "SLOT_EVENT_WORDS",
    "TABLE_EDIT_WORDS",
    "TIER_COPY_WORDS",
    "Candidate",
    "ConfigError",
    "Core",
    "CoreBug",
    "Inbox",
    "PlanSizes",
    "RequestError",
    "StepError",
    "StepLoop",
    "StepNews",
    "StepOutputs",
    "Transfer",
    "TransferError",
    "__version__",
    "cpu",
    "text",
]

__version__: Final[str]
DISTRIBUTION: Final[str]

PLAN_VERSION: Final[int]
HEADER_WORDS: Final[int]
SLOT_EVENT_WORDS: Final[int]
TABLE_EDIT_WORDS: Final[int]
TIER_COPY_WORDS: Final[int]
COPY_WORDS: Final[int]
HEADER: Final[dict[str, int]]
FINISH_REASONS: Final[dict[int, str]]
CORE_DEFAULTS: Final[dict[str, Any]]

_Tokens: TypeAlias = (
    NDArray[np.int32]
    | NDArray[np.uint32]
    | NDArray[np.int64]
    | Sequence[int]
    | Sequence[np.integer]
)
_State: TypeAlias = Literal["running", "paused", "draining", "closed"]
_Policy: TypeAlias = Literal["fcfs", "priority"] | Callable[[Candidate], int]

@type_check_only
class _LayerGroup(TypedDict):
    layers: int
    window: int | None

class RequestError(FastserveError, ValueError):
    code: str
    http_status: int

class StepError(FastserveError, RuntimeError): ...
class TransferError(FastserveError, RuntimeError): ...
class CoreBug(FastserveError, RuntimeError): ...

@final
class Core:
    def __new__(
        cls,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_model_len: int = 4096,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 2048,
        max_chunk_tokens: int | None = None,
        long_prefill_threshold: int | None = None,
        max_long_prefill_percent: int = 100,
        max_num_mixed_prefill_tokens: int | None = None,
        context_per_token: int | None = None,
        max_num_output_rows: int = 1024,
        max_num_steps_in_flight: int = 1,
        max_num_draft_tokens: int = 0,
        enable_prefix_caching: bool = True,
        scheduling_policy: _Policy = "fcfs",
        max_wait_s: float | None = 30.0,
        watermark_blocks: int = 0,
        vocab_size: int = 2147483647,
        max_num_queued_requests: int = 4096,
        max_num_queued_tokens: int = 67108864,
        max_num_sequences_per_request: int = 128,
        max_sampling_words: int = 4096,
        max_num_step_failures: int = 3,
        max_num_tickets: int = 8,
        hash_seed: int = 11400714819323198485,
        num_step_records: int = 4096,
        num_timeline_events: int = 65536,
        enable_block_events: bool = False,
        groups: Sequence[_LayerGroup] | None = None,
    ) -> Core: ...
    @property
    def layout(self) -> dict[str, tuple[int, int]]: ...
    @property
    def plan_words(self) -> int: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def warnings(self) -> list[str]: ...
    @property
    def block_tables(self) -> NDArray[np.int32]: ...
    @property
    def state(self) -> _State: ...
    @property
    def bug(self) -> str | None: ...
    def inbox(self) -> Inbox: ...
    def plan(self, now: int, arena: NDArray[np.int32]) -> PlanSizes: ...
    def commit(
        self, step: int, now: int, counts: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> StepOutputs: ...
    def fail(self, step: int, now: int) -> StepOutputs: ...
    def take_outputs(self) -> StepOutputs: ...
    def offload(
        self, tokens: _Tokens, places: _Tokens, *, first_block: int = 0, namespace: int = 0
    ) -> Transfer: ...
    def fetch(self, tokens: _Tokens, places: _Tokens, *, namespace: int = 0) -> Transfer: ...
    def complete(self, ticket: int, ok: bool) -> bool: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def has_work(self) -> bool: ...
    def stats(self) -> dict[str, int]: ...
    def check(self) -> None: ...
    def timeline(self, request_id: int) -> list[dict[str, Any]]: ...
    def snapshot(self) -> list[dict[str, Any]]: ...
    def take_block_events(self) -> list[dict[str, Any]]: ...

@final
class Inbox:
    def submit(
        self,
        request_id: int,
        prompt: _Tokens,
        *,
        max_tokens: int,
        arrival: int,
        min_tokens: int = 0,
        stop_token_ids: _Tokens = (),
        num_sequences: int = 1,
        priority: int = 0,
        score_prompt: bool = False,
        namespace: int = 0,
        adapter: int = 0,
        spans: Sequence[tuple[int, int, int]] = (),
        sampling: NDArray[np.int32] | None = None,
    ) -> None: ...
    def abort(self, request_id: int) -> bool: ...
    def finish(
        self,
        request_id: int,
        index: int,
        reason: Literal["stop", "length", "abort", "error"],
        num_tokens_kept: int,
    ) -> bool: ...
    def is_live(self, request_id: int) -> bool: ...
    def has_commands(self) -> bool: ...
    @property
    def state(self) -> _State: ...
    @property
    def bug(self) -> str | None: ...
    def predicted_wait(self) -> int: ...
    def stats(self) -> dict[str, int]: ...
    def timeline(self, request_id: int) -> list[dict[str, Any]]: ...
    def steps_since(self, step: int) -> list[dict[str, Any]]: ...

@final
class PlanSizes:
    @property
    def step(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_outputs(self) -> int: ...
    @property
    def num_copies(self) -> int: ...
    @property
    def is_step(self) -> bool: ...

@final
class Transfer:
    @property
    def ticket(self) -> int: ...
    @property
    def first_block(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...

@final
class StepOutputs:
    @property
    def request_ids(self) -> NDArray[np.uint64]: ...
    @property
    def seq_indices(self) -> NDArray[np.uint32]: ...
    @property
    def source_rows(self) -> NDArray[np.int32]: ...
    @property
    def token_indptr(self) -> NDArray[np.uint32]: ...
    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def finish_reasons(self) -> NDArray[np.uint8]: ...
    @property
    def stop_tokens(self) -> NDArray[np.int32]: ...
    @property
    def num_cached_tokens(self) -> NDArray[np.uint32]: ...
    @property
    def num_output_tokens(self) -> NDArray[np.uint32]: ...
    def __len__(self) -> int: ...

@final
class StepLoop:
    def __new__(
        cls,
        core: Core,
        decoder: cpu.Decoder,
        pool: cpu.Pool,
        kv: NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.int8],
        cos_sin: NDArray[np.float32],
        *,
        now: int,
    ) -> StepLoop: ...
    def start(self) -> None: ...
    def fileno(self) -> int: ...
    def has_work(self) -> bool: ...
    def check(self) -> None: ...
    def take(self) -> StepNews | None: ...
    def stop(self) -> None: ...

@final
class StepNews:
    @property
    def step(self) -> int | None: ...
    @property
    def at(self) -> int: ...
    @property
    def outputs(self) -> StepOutputs: ...
    @property
    def samples(self) -> cpu.Samples | None: ...
    @property
    def failure(self) -> str | None: ...

@final
class Candidate:
    @property
    def request_id(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def arrival(self) -> int: ...
