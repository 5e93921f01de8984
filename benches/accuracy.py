"""What number formats cost in accuracy: SmolLM2 over text of this repository.

    make bench-accuracy
    make bench-accuracy ARGS="--formats int8 bfloat16 --num-tokens 2048 --kv-cache-dtype bfloat16"

The text is the documents of this repository in order, in windows that each begin anew. For each
format one JSON line: bytes a weight, perplexity of the text, and how far its logits are from those
of float32 at every position (KL divergence, mean and 99th percentile; how often the likeliest token
is the same; the largest difference of a logit).

The model comes as a file in Q4_1 and Q8_0. Its dequantized numbers are what every other format is
made from, so ``file`` is exact here by construction, which says nothing about Q4_1. The ``gguf``
package quantizes to Q8_0 and Q4_0. It has no quantizer for Q4_K: :func:`q4_k` is a plain one, which
takes each group's extremes where llama.cpp searches for the scale with the least error. Blocks of
Q4_K are 256 numbers, so that matrices with other rows become Q8_0: all but the MLP's last.
``int8 weights`` has weights rounded as ``int8`` has them and activations that are not.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np

from fastserve import LLM, SamplingParams
from fastserve.arena import OutputKind, PlanView, Words
from fastserve.config import EngineConfig
from fastserve.engine import Engine
from fastserve.host import cpus
from fastserve.models.memory import Logits
from fastserve.models.resolve import ModelSource, resolve
from fastserve.runner import CpuRunner
from fastserve.text.tokenizer import Tokenizer

REPOSITORY = Path(__file__).resolve().parent.parent
TEXTS = ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/adr/*.md")
WINDOW = 512
SCORES = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


class Recorder(CpuRunner):
    """Keeps the logits of prompt tokens."""

    scores: list[Logits]

    def native_parts(self) -> None:
        """None: every step comes through ``forward``."""

    def forward(self, plan: PlanView, last_samples: Words) -> Logits:
        """As the runner does it."""
        logits = super().forward(plan, last_samples)
        self.scores.append(logits[plan.out_kinds == OutputKind.SCORE].copy())
        return logits


class Model:
    """A model in one format.

    Args:
        source: Its file.
        options: For loading it.
    """

    def __init__(self, source: ModelSource, **options: Any) -> None:
        self._runner = Recorder.load(source, **options)
        config = EngineConfig(
            num_blocks=2 * WINDOW // 16, enable_prefix_caching=False, max_model_len=WINDOW + 1
        )
        self._llm = LLM.from_engine(Engine(self._runner, None, config))

    def score(self, tokens: list[int]) -> tuple[np.ndarray, Logits]:
        """Log-probability of each token after the first, and all logits there."""
        self._runner.scores = []
        (output,) = self._llm.generate({"prompt_token_ids": tokens}, SCORES, progress=False)
        assert output.prompt_logprobs is not None
        found = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
        logprobs = [beside[token].logprob for token, beside in found if beside is not None]
        return np.array(logprobs), np.concatenate(self._runner.scores)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return self._runner.weight_bytes

    @property
    def formats(self) -> list[str]:
        """What matrices are in."""
        return self._runner.weights.formats()


def q4_k(numbers: np.ndarray) -> np.ndarray:
    """Rows of whole blocks of 256 as Q4_K: the layout of ``ggml-common.h``."""
    groups = numbers.reshape(-1, 8, 32)
    low = np.minimum(groups.min(axis=2), 0.0)
    step, offset = (groups.max(axis=2).clip(min=0.0) - low) / 15, -low
    of_steps, of_offsets = (
        (values.max(axis=1, keepdims=True) / 63).astype(np.float16) for values in (step, offset)
    )
    steps, offsets = (
        np.rint(values / np.maximum(scale, np.float16(1e-7)).astype(np.float32)).clip(0, 63)
        for values, scale in ((step, of_steps), (offset, of_offsets))
    )
    real_step, real_offset = steps * of_steps, offsets * of_offsets
    quotients = (groups + real_offset[..., None]) / np.where(real_step > 0, real_step, np.inf)[
        ..., None
    ]
    codes = np.rint(quotients).clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    steps, offsets = steps.astype(np.uint8), offsets.astype(np.uint8)
    scales = np.concatenate(
        [
            steps[:, :4] | steps[:, 4:] >> 4 << 6,
            offsets[:, :4] | offsets[:, 4:] >> 4 << 6,
            steps[:, 4:] & 15 | (offsets[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    halves = [half.view(np.uint8) for half in (of_steps, of_offsets)]
    packed = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(len(groups), 128)
    blocks = np.concatenate([*halves, scales, packed], axis=1)
    return blocks.reshape(len(numbers), -1)


Converted: TypeAlias = tuple[np.ndarray, gguf.GGMLQuantizationType]


def to(kind: gguf.GGMLQuantizationType, numbers: np.ndarray) -> Converted:
    """A matrix in a format that the ``gguf`` package writes."""
    return gguf.quantize(numbers, kind), kind


def to_q4_k(numbers: np.ndarray) -> Converted:
    """A matrix as Q4_K if its rows are whole blocks."""
    if numbers.shape[1] % 256:
        return to(gguf.GGMLQuantizationType.Q8_0, numbers)
    return q4_k(numbers), gguf.GGMLQuantizationType.Q4_K


def to_int8(numbers: np.ndarray) -> Converted:
    """A matrix rounded to int8 by rows, as float32."""
    scale = np.abs(numbers).max(axis=1, keepdims=True) / np.float32(127)
    rounded = np.rint(numbers / np.where(scale > 0, scale, np.inf)) * scale
    return rounded, gguf.GGMLQuantizationType.F32


def write(source: Path, path: Path, convert: Callable[[np.ndarray], Converted]) -> None:
    """The model of ``source``, a GGUF file, with its matrices in another format."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, found in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        is_array = found.types[0] is gguf.GGUFValueType.ARRAY
        items = found.types[-1] if is_array else None
        writer.add_key_value(name, found.contents(), found.types[0], sub_type=items)
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        if numbers.ndim == 1:
            writer.add_tensor(tensor.name, numbers)
            continue
        raw, kind = convert(numbers)
        writer.add_tensor(tensor.name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_file(
    convert: Callable[[np.ndarray], Converted], source: ModelSource, **options: Any
) -> Model:
    """The model with its matrices in a format of files."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write(source.path, path, convert)
        return Model(resolve(path), **options)


FORMATS: dict[str, Callable[..., Model]] = {
    "float32": partial(Model, dtype="float32"),
    "bfloat16": partial(Model, dtype="bfloat16"),
    "int8": partial(Model, quantization="int8"),
    "int8 weights": partial(as_file, to_int8),
    "int4": partial(Model, quantization="int4"),
    "Q8_0": partial(as_file, partial(to, gguf.GGMLQuantizationType.Q8_0)),
    "Q4_K": partial(as_file, to_q4_k),
    "Q4_0": partial(as_file, partial(to, gguf.GGMLQuantizationType.Q4_0)),
    "file": Model,
}


def log_softmax(logits: Logits) -> np.ndarray:
    """In float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


class Difference:
    """How far one format's logits are from another's, over all windows."""

    def __init__(self) -> None:
        self.logprobs: list[np.ndarray] = []
        self.divergences: list[np.ndarray] = []
        self.agreements: list[np.ndarray] = []
        self.largest = 0.0

    def add(self, logprobs: np.ndarray, logits: Logits, exact: Logits, theirs: np.ndarray) -> None:
        """A window: ours, and the other's logits and their log-softmax."""
        self.logprobs.append(logprobs)
        shares = np.exp(theirs) * (theirs - log_softmax(logits))
        self.divergences.append(shares.sum(axis=1))
        self.agreements.append(logits.argmax(axis=1) == exact.argmax(axis=1))
        self.largest = max(self.largest, float(np.abs(logits - exact).max()))

    def record(self) -> dict[str, Any]:
        """What to print."""
        divergences = np.concatenate(self.divergences)
        return {
            "perplexity": round(math.exp(-np.concatenate(self.logprobs).mean()), 4),
            "mean_kl": float(f"{divergences.mean():.3g}"),
            "p99_kl": float(f"{np.quantile(divergences, 0.99):.3g}"),
            "same_best_percent": round(100 * np.concatenate(self.agreements).mean(), 2),
            "largest_logit_difference": float(f"{self.largest:.3g}"),
        }


def windows(tokenizer: Tokenizer, num_tokens: int) -> Iterator[list[int]]:
    """The text in pieces of :data:`WINDOW` tokens, about so many in all."""
    paths = [path for pattern in TEXTS for path in sorted(REPOSITORY.glob(pattern))]
    tokens = tokenizer.encode("\n".join(path.read_text() for path in paths))
    for first in range(0, min(num_tokens, len(tokens)) - WINDOW + 1, WINDOW):
        yield tokens[first : first + WINDOW]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--num-tokens", type=int, default=4096)
    parser.add_argument(
        "--kv-cache-dtype", default="auto", help="of the formats; the reference keeps float32"
    )
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    asked = arguments()
    logging.getLogger("fastserve").setLevel(logging.ERROR)
    source = resolve("smollm2")
    pieces = list(windows(Tokenizer.from_source(source), asked.num_tokens))
    threads = {"num_threads": cpus().num_usable}
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True
    ).stdout.strip()
    about = {"bench": "accuracy", "model": source.name, "commit": commit, "windows": len(pieces)}
    print(json.dumps(about | {"tokens": WINDOW * len(pieces)}), flush=True)
    reference = Model(source, dtype="float32", **threads)
    models = {
        name: FORMATS[name](source, kv_cache_dtype=asked.kv_cache_dtype, **threads)
        for name in asked.formats
    }
    differences = {name: Difference() for name in models}
    for tokens in pieces:
        _, exact = reference.score(tokens)
        theirs = log_softmax(exact)
        for name, model in models.items():
            differences[name].add(*model.score(tokens), exact, theirs)
    num_weights = reference.num_bytes / 4
    for name, model in models.items():
        record = {
            "format": name,
            "matrices": "+".join(model.formats),
            "kv_cache_dtype": asked.kv_cache_dtype,
            "bytes_a_weight": round(model.num_bytes / num_weights, 3),
        }
        print(json.dumps(record | differences[name].record()), flush=True)


if __name__ == "__main__":
    main()
