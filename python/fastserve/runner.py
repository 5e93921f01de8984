"""What runs a plan: the protocol that every back end implements, and the CPU's.

An engine asks a runner for four things: the model's record, how large a block is, memory for the
blocks, and logits for a plan. Before layer 0 a runner applies the plan's copies; the order is
``copies_out``, ``copies_in``, ``copies``.
"""

from __future__ import annotations

from typing import Final, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastserve import host
from fastserve.arena import PlanView, Words
from fastserve.errors import ModelError
from fastserve.kernels.cpu import CpuKernels, as_array, empty_kv
from fastserve.models.checkpoint import Checkpoint
from fastserve.models.config import DecoderConfig
from fastserve.models.decoder import Decoder, KvCache
from fastserve.models.resolve import ModelSource
from fastserve.models.weights import DecoderWeights, Packing, Progress, load_weights

Logits: TypeAlias = Tensor
"""float32 ``[num_outputs, vocab_size]``, valid until the runner's next step."""

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Runner(Protocol):
    """A model on a device.

    Attributes:
        config: The architecture.
        vocab_size: Columns of the logits.
        device: Where it runs: ``cpu``, ``cuda:0``.
    """

    config: DecoderConfig
    vocab_size: int
    device: str

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Memory that one block takes, over all layers."""

    def allocate_kv(self, num_blocks: int, block_size: int, block_tables: Words) -> None:
        """Make the cache. ``block_tables`` is the core's memory, read at every step."""

    def forward(self, plan: PlanView, last_samples: Words) -> Logits:
        """Run one step.

        ``last_samples[slot]`` is the last token that the slot's sequence sampled: what a token id
        of −1 − slot stands for.
        """


class CpuRunner:
    """A model on the CPU. One thread at a time steps it.

    Args:
        config: The architecture.
        weights: In the dtype that is computed in.
        kernels: Our kernels' pool of threads.
        kv_dtype: What keys and values are stored as.
    """

    device = "cpu"

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        kernels: CpuKernels,
        kv_dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.kernels = kernels
        self.kv_dtype = kv_dtype
        self._decoder = Decoder(config, weights, kernels)
        self._kv: Tensor | None = None
        self._cache: KvCache | None = None

    @classmethod
    def load(
        cls,
        source: ModelSource,
        *,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        num_threads: int | None = None,
        progress: Progress | None = None,
    ) -> CpuRunner:
        """Read a model's weights.

        Sets the number of torch's threads, which is one number for the whole process: 1 where
        products are ours.

        Args:
            source: From :func:`fastserve.models.resolve.resolve`.
            dtype: ``float32`` or ``bfloat16``, which weights are converted to. ``auto``: weights
                stay in the file's format where a kernel knows it; bfloat16 is computed in where
                the file has it and the CPU multiplies it natively, otherwise float32.
            kv_cache_dtype: The same for keys and values; ``auto`` is what is computed in.
            num_threads: Threads that compute. By default one for each core that may be used.
            progress: Called as the weights come in.

        Raises:
            ModelError: The model is not supported or its files are broken.
        """
        config = source.config()
        checkpoint = _checkpoint(source)
        threads = num_threads or host.cpus().num_usable
        kernels = CpuKernels(threads)
        computed = _auto_dtype(checkpoint, kernels) if dtype == "auto" else DTYPES[dtype]
        packing = _packing(dtype, computed, kernels)
        # Where products are ours, torch's threads would only wait, spinning, on the cores of ours.
        torch.set_num_threads(threads if packing is None else 1)
        stored = computed if kv_cache_dtype == "auto" else DTYPES[kv_cache_dtype]
        _check_heads(config, stored, source)
        weights = load_weights(
            checkpoint,
            config,
            computed,
            packing=packing,
            num_threads=threads,
            progress=progress,
        )
        return cls(config, weights, kernels, stored)

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return self._decoder.dtype

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take."""
        return self._decoder.weights.num_bytes()

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Memory that one block takes, over all layers."""
        per_token = 2 * self.config.kv_size * self.kv_dtype.itemsize
        return self.config.num_layers * block_size * per_token

    def allocate_kv(self, num_blocks: int, block_size: int, block_tables: Words) -> None:
        """Make the cache. The memory is taken only where it is used."""
        config = self.config
        self._kv = empty_kv(
            config.num_layers,
            num_blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
            self.kv_dtype,
        )
        table = self._decoder.rope_table(block_tables.shape[1] * block_size)
        self._cache = KvCache(
            layers=[as_array(layer) for layer in self._kv],
            block_tables=block_tables,
            cos_sin=as_array(table),
        )

    @torch.inference_mode()
    def forward(self, plan: PlanView, last_samples: Words) -> Logits:
        """Run one step: copies, then the decoder."""
        if self._cache is None or self._kv is None:
            raise RuntimeError("allocate_kv comes before the first step")
        if len(plan.copies_out) or len(plan.copies_in):
            raise RuntimeError("the plan copies blocks to or from another tier; there is none here")
        if len(plan.copies):
            copies = torch.from_numpy(plan.copies.astype(np.int64))
            self._kv.index_copy_(1, copies[:, 1], self._kv.index_select(1, copies[:, 0]))
        token_ids = torch.from_numpy(known_tokens(plan.token_ids, last_samples))
        return self._decoder.forward(token_ids, plan, self._cache)


def _auto_dtype(checkpoint: Checkpoint, kernels: CpuKernels) -> torch.dtype:
    """The file's own format where that is fast, and otherwise one that loses nothing of it."""
    as_stored = checkpoint.main_format() == "BF16" and kernels.isa.endswith("bf16")
    return torch.bfloat16 if as_stored else torch.float32


def _packing(dtype: str, computed: torch.dtype, kernels: CpuKernels) -> Packing | None:
    """Our own products, except where torch has instructions that ours do not use yet."""
    if computed == torch.bfloat16 and kernels.isa.endswith("bf16"):
        return None
    return Packing.AS_STORED if dtype == "auto" else Packing.AS_COMPUTED


def _check_heads(config: DecoderConfig, kv_dtype: torch.dtype, source: ModelSource) -> None:
    """Refuse heads that the kernels do not take, before gigabytes are read."""
    try:
        empty_kv(1, 1, 16, config.num_kv_heads, config.head_dim, kv_dtype)
    except ValueError as error:
        raise ModelError(f"{source.path}: the CPU kernels cannot run this model: {error}") from None


def known_tokens(token_ids: Words, last_samples: Words) -> NDArray[np.int64]:
    """Token ids with every −1 − slot replaced by that slot's last sample."""
    known = token_ids.astype(np.int64)
    unknown = np.flatnonzero(known < 0)
    if unknown.size:
        known[unknown] = last_samples[-1 - known[unknown]]
    return known


def _checkpoint(source: ModelSource) -> Checkpoint:
    if source.gguf is None:
        return Checkpoint.from_folder(source.path)
    return Checkpoint.from_gguf(source.gguf)
