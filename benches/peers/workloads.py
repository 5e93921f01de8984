"""What is asked of every engine: requests by token id, the same for all and on every machine.

Lengths are the same in every round; contents differ, so that no prefix cache helps across rounds.
End-of-sequence is ignored everywhere, so a request has exactly the wanted number of tokens.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

LOWEST_TOKEN, HIGHEST_TOKEN = 1000, 40000  # Plain text in every vocabulary that is used.
LENGTHS_SEED = 1000


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        name: Unique within a workload and a round.
        at_s: When it is submitted, in seconds after the workload's start.
        prompt: Token ids.
        num_tokens: Tokens to generate.
        role: ``stream`` and ``long`` in W4, otherwise empty.
    """

    name: str
    at_s: float
    prompt: list[int]
    num_tokens: int
    role: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a name stands for.

    Attributes:
        name: As in ``WORK=W1,W3``.
        title: One line for documents.
        timeout_s: After this the run ends and what has not finished is counted as missing.
    """

    name: str
    title: str
    timeout_s: float


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", "64 requests at once: 18,198 prompt and 4,521 output tokens", 900),
        Workload("W1S", "the first 16 requests of W1, for larger models", 900),
        Workload("W2", "64 at once: 1,024 shared + 32 own prompt tokens, 32 outputs, cold", 900),
        Workload("W3", "one request: 128 prompt and 128 output tokens", 300),
        Workload("W4", "8 streams (64 + 512); after 2 s a prompt of 4,096 arrives", 600),
        Workload("W5", "Poisson arrivals with W1's lengths", 60),
    )
}


def build(
    name: str, seed: int, *, rate: float = 0.0, span_s: float = 30.0, scale: float = 1.0
) -> list[Request]:
    """Make the requests of a workload.

    Args:
        name: A key of :data:`WORKLOADS`.
        seed: Of the contents, and of W5's arrivals and lengths.
        rate: W5's requests a second.
        span_s: W5's length in seconds.
        scale: Below 1, fewer and shorter requests, to try an engine out; see :func:`shortened`.

    Raises:
        ValueError: The name is not known, or W5 has no rate.
    """
    if name not in WORKLOADS:
        raise ValueError(f"{name}: want one of {', '.join(WORKLOADS)}")
    if name == "W5":
        requests = _poisson(seed, rate, span_s)
    else:
        make = {"W1": _batch, "W1S": _small_batch, "W2": _shared, "W3": _single, "W4": _interrupted}
        requests = make[name](seed)
    return shortened(requests, scale) if scale < 1.0 else requests


def warm_up(seed: int) -> list[Request]:
    """Four requests that page memory in and let an engine compile, before anything is measured."""
    rng = random.Random(seed)
    return [Request(f"warm-{seed}-{i}", 0.0, _tokens(rng, 300), 8) for i in range(4)]


def first_request(seed: int) -> list[Request]:
    """The request that start-to-first-token is measured with: 32 prompt tokens."""
    return [Request(f"first-{seed}", 0.0, _tokens(random.Random(seed), 32), 8)]


def shortened(requests: list[Request], scale: float) -> list[Request]:
    """Keep a share of the requests, of their tokens and of the time: at least one of each role."""
    kept: list[Request] = []
    for role in dict.fromkeys(request.role for request in requests):
        same = [request for request in requests if request.role == role]
        kept += same[: math.ceil(len(same) * scale)]
    return [
        replace(
            request,
            at_s=request.at_s * scale,
            prompt=request.prompt[-max(8, int(len(request.prompt) * scale)) :],
            num_tokens=max(4, int(request.num_tokens * scale)),
        )
        for request in kept
    ]


def _tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(num)]


def _lengths(rng: random.Random) -> tuple[int, int]:
    """Prompt and output tokens of a request of W1 and W5."""
    return rng.randint(32, 512), rng.randint(16, 128)


def _batch(seed: int) -> list[Request]:
    lengths_rng = random.Random(LENGTHS_SEED)
    lengths = [_lengths(lengths_rng) for _ in range(64)]
    rng = random.Random(seed)
    return [
        Request(f"w1-{seed}-{i}", 0.0, _tokens(rng, prompt), output)
        for i, (prompt, output) in enumerate(lengths)
    ]


def _small_batch(seed: int) -> list[Request]:
    return _batch(seed)[:16]


def _shared(seed: int) -> list[Request]:
    rng = random.Random(seed + 7)
    prefix = _tokens(rng, 1024)
    return [Request(f"w2-{seed}-{i}", 0.0, prefix + _tokens(rng, 32), 32) for i in range(64)]


def _single(seed: int) -> list[Request]:
    return [Request(f"w3-{seed}", 0.0, _tokens(random.Random(seed + 11), 128), 128)]


def _interrupted(seed: int) -> list[Request]:
    rng = random.Random(seed + 13)
    requests = [
        Request(f"w4-{seed}-{i}", 0.0, _tokens(rng, 64), 512, role="stream") for i in range(8)
    ]
    requests.append(Request(f"w4-{seed}-long", 2.0, _tokens(rng, 4096), 16, role="long"))
    return requests


def _poisson(seed: int, rate: float, span_s: float) -> list[Request]:
    if rate <= 0.0:
        raise ValueError(f"rate={rate}: W5 wants requests a second, more than 0")
    rng = random.Random(seed + 17)
    requests: list[Request] = []
    at_s = rng.expovariate(rate)
    while at_s < span_s:
        prompt = _tokens(rng, rng.randint(32, 512))
        requests.append(
            Request(f"w5-{rate:g}-{seed}-{len(requests)}", at_s, prompt, rng.randint(16, 128))
        )
        at_s += rng.expovariate(rate)
    return requests
