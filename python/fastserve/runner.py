"""What runs a plan: the protocol that every back end implements, and the CPU's.

An engine asks a runner for four things: the model's record, how large a block is, memory for the
blocks, and logits for a plan. Before layer 0 a runner applies the plan's copies; the order is
``copies_out``, ``copies_in``, ``copies``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

from fastserve import costs, host
from fastserve._core import cpu
from fastserve.arena import PlanView, Words
from fastserve.costs import MIN_POSITIONS, StepCosts
from fastserve.errors import ModelError
from fastserve.kernels.pool import make_pool, multiplies_bfloat16
from fastserve.models.checkpoint import Checkpoint
from fastserve.models.config import DecoderConfig
from fastserve.models.memory import KvArray, KvCache, KvDType, Logits, empty_kv
from fastserve.models.native import NativeDecoder
from fastserve.models.resolve import ModelSource
from fastserve.models.rope import rope_table
from fastserve.models.tensors import DType
from fastserve.models.weights import DecoderWeights, Packing, Progress, load_weights

__all__ = ["CpuRunner", "Logits", "NativeParts", "Runner"]


@dataclass(frozen=True, slots=True)
class NativeParts:
    """What it takes to run steps without Python.

    Attributes:
        decoder: The model.
        pool: Threads that compute.
        cache: Keys and values.
    """

    decoder: cpu.Decoder
    pool: cpu.Pool
    cache: KvCache


class Runner(Protocol):
    """A model on a device.

    Attributes:
        config: The architecture.
        vocab_size: Columns of the logits.
        device: Where it runs: ``cpu``, ``cuda:0``.
        pool: Threads that sampling on the CPU shares out its rows to.
    """

    config: DecoderConfig
    vocab_size: int
    device: str
    pool: cpu.Pool

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Memory that one block takes, over all layers."""

    def allocate_kv(self, num_blocks: int, block_size: int, block_tables: Words) -> None:
        """Make the cache. ``block_tables`` is the core's memory, read at every step."""

    def step_costs(self) -> StepCosts | None:
        """What a step takes, measured now; ``None`` where that is not known."""

    def native_parts(self) -> NativeParts | None:
        """What runs steps in place of ``forward``, once there is a cache; ``None``: nothing."""

    def forward(self, plan: PlanView, last_samples: Words) -> Logits:
        """Run one step.

        ``last_samples[slot]`` is the last token that the slot's sequence sampled: what a token id
        of −1 − slot stands for.
        """


class CpuRunner:
    """A model on the CPU. One thread at a time steps it.

    Args:
        config: The architecture.
        weights: Packed.
        pool: Threads that compute.
        kv_dtype: What keys and values are stored as.
    """

    device = "cpu"

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        pool: cpu.Pool,
        kv_dtype: KvDType,
    ) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.pool = pool
        self.kv_dtype = kv_dtype
        self.weights = weights
        self._decoder = NativeDecoder(config, weights, pool)
        self._cache: KvCache | None = None

    @classmethod
    def load(
        cls,
        source: ModelSource,
        *,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        quantization: Literal["int8", "int4"] | None = None,
        num_threads: int | None = None,
        progress: Progress | None = None,
    ) -> CpuRunner:
        """Read a model's weights.

        Args:
            source: From :func:`fastserve.models.resolve.resolve`.
            dtype: ``float32`` or ``bfloat16``, which weights are converted to. ``auto``: weights
                stay in the file's format where a kernel knows it; bfloat16 is computed in where
                the file has it and the processor multiplies it, otherwise float32.
            kv_cache_dtype: ``float32``, ``bfloat16`` or ``int8``: what keys and values are stored
                as; ``auto`` is what is computed in.
            quantization: ``int8`` or ``int4``: what weights become, whatever the file has
                (:class:`fastserve.models.weights.Packing`). ``dtype`` then says what activations
                are; ``auto`` is float32.
            num_threads: Threads that compute. By default one for each core that may be used.
            progress: Called as the weights come in.

        Raises:
            ModelError: The model is not supported or its files are broken.
        """
        config = source.config()
        checkpoint = _checkpoint(source)
        threads = num_threads or host.cpus().num_usable
        pool = make_pool(threads)
        if dtype != "auto":
            computed = DType(dtype)
        else:
            computed = DType.FLOAT32 if quantization else _auto_dtype(checkpoint, pool)
        stored = KvDType(computed if kv_cache_dtype == "auto" else kv_cache_dtype)
        _check_heads(config, stored, source)
        weights = load_weights(
            checkpoint,
            config,
            computed,
            packing=Packing(quantization) if quantization else _packing(dtype),
            num_threads=threads,
            progress=progress,
        )
        return cls(config, weights, pool, stored)

    @property
    def dtype(self) -> DType:
        """What is computed in."""
        return self.weights.dtype

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take."""
        return self.weights.num_bytes()

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Memory that one block takes, over all layers."""
        return self._empty_kv(1, block_size).nbytes

    def allocate_kv(self, num_blocks: int, block_size: int, block_tables: Words) -> None:
        """Make the cache. The memory is taken only where it is used.

        Raises:
            MemoryError: The system does not give as much; names it.
        """
        config = self.config
        num_positions = block_tables.shape[1] * block_size
        try:
            kv = self._empty_kv(num_blocks, block_size)
        except MemoryError:
            num_gib = num_blocks * self.kv_bytes_per_block(block_size) / 2**30
            raise MemoryError(
                f"num_blocks={num_blocks}: their keys and values take {num_gib:.1f} GiB, which the "
                "system does not give; choose a lower num_blocks or max_model_len"
            ) from None
        self._cache = KvCache(
            kv=kv,
            block_tables=block_tables,
            cos_sin=rope_table(
                config.rope, config.head_dim, num_positions, self.weights.rope_divisors
            ),
        )

    def _empty_kv(self, num_blocks: int, block_size: int) -> KvArray:
        config = self.config
        heads, head_dim = config.num_kv_heads, config.head_dim
        return empty_kv(config.num_layers, num_blocks, block_size, heads, head_dim, self.kv_dtype)

    def step_costs(self) -> StepCosts | None:
        """What a step takes: some of one layer are run, which takes a fraction of a step."""
        if self.config.max_positions < MIN_POSITIONS:
            return None
        config = replace(self.config, num_layers=1, windows=self.config.windows[:1])
        weights = replace(self.weights, layers=self.weights.layers[:1])
        layer = CpuRunner(config, weights, self.pool, self.kv_dtype)
        return costs.measure(
            layer,
            num_layers=self.config.num_layers,
            weight_ratio=self.weight_bytes / layer.weight_bytes,
        )

    def native_parts(self) -> NativeParts | None:
        """The decoder and its cache."""
        if self._cache is None:
            raise RuntimeError("allocate_kv comes before the first step")
        return NativeParts(self._decoder.decoder, self.pool, self._cache)

    def forward(self, plan: PlanView, last_samples: Words) -> Logits:
        """Run one step: copies, then the decoder."""
        if self._cache is None:
            raise RuntimeError("allocate_kv comes before the first step")
        if len(plan.copies_out) or len(plan.copies_in):
            raise RuntimeError("the plan copies blocks to or from another tier; there is none here")
        return self._decoder.forward(plan, last_samples, self._cache)


def _auto_dtype(checkpoint: Checkpoint, pool: cpu.Pool) -> DType:
    """The file's own format where that is fast, and otherwise one that loses nothing of it."""
    as_stored = checkpoint.main_format() == "BF16" and multiplies_bfloat16(pool)
    return DType.BFLOAT16 if as_stored else DType.FLOAT32


def _packing(dtype: str) -> Packing:
    return Packing.AS_STORED if dtype == "auto" else Packing.AS_COMPUTED


def _check_heads(config: DecoderConfig, kv_dtype: KvDType, source: ModelSource) -> None:
    """Refuse heads that the kernels do not take, before gigabytes are read."""
    try:
        empty_kv(1, 1, 16, config.num_kv_heads, config.head_dim, kv_dtype)
    except ValueError as error:
        raise ModelError(f"{source.path}: the CPU kernels cannot run this model: {error}") from None


def _checkpoint(source: ModelSource) -> Checkpoint:
    if source.gguf is None:
        return Checkpoint.from_folder(source.path)
    return Checkpoint.from_gguf(source.gguf)
