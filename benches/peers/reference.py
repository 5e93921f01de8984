"""What peers are known to reach, and whether a measured peer is near enough to be compared with.

The table was measured on 2 cores of a Zen 5 with AVX-512 BF16 and VNNI, two threads, best
settings. A peer that is slower here than it says, scaled to this machine as it is at the moment,
was probably set up badly, and beating it shows nothing.

*Scaling.* On a processor with AVX-512 BF16 the table is scaled by read bandwidth alone. Elsewhere
the bandwidth says nothing about products: W3's time a token, for which one stream reads all
weights, is still scaled by bandwidth, and everything else by the rate of multiply-adds that the
machine has for that precision: float32's, where it has no instructions for bfloat16. There a
slower peer is not called ``invalid`` but ``unproven``: its kernels for these instructions may be
less tuned than those of the table, so the row says what it does here, and not that it was set up
well.
"""

from __future__ import annotations

from dataclasses import dataclass

TOLERANCE = 0.15
READ_GB_PER_S = 56.0  # The middle of what was read while the table was made: 50 to 62.
GFLOP_PER_S = {"bf16": 996.0, "f32": 538.0}

# (model, precision, engine) → {(workload, measure): value}. Times in seconds.
_W1, _W2 = ("W1", "tokens_per_s"), ("W2", "wall_s")
_W3, _TTFT = ("W3", "itl_mean_s"), ("W3", "ttft_p50_s")
_GAP, _LONG = ("W4", "gap_worst_s"), ("W4", "long_ttft_s")
_W1S = ("W1S", "tokens_per_s")
TABLE: dict[tuple[str, str, str], dict[tuple[str, str], float]] = {
    ("smollm2", "bf16", "vllm"): {
        _W1: 421, _W2: 3.2, _W3: 0.0122, _TTFT: 0.050, _GAP: 1.65, _LONG: 2.6,
    },
    ("smollm2", "bf16", "openvino"): {
        _W1: 411, _W2: 28.5, _W3: 0.0094, _TTFT: 0.048, _GAP: 0.20, _LONG: 2.5,
    },
    ("smollm2", "int8", "openvino"): {_W1: 413, _W3: 0.0080, _TTFT: 0.047},
    ("smollm2", "bf16", "llama"): {
        _W1: 197, _W2: 25.7, _W3: 0.0089, _TTFT: 0.082, _GAP: 3.6, _LONG: 5.6,
    },
    ("smollm2", "int8", "llama"): {_W1: 122, _W3: 0.0067, _TTFT: 0.154},
    ("smollm2", "bf16", "transformers"): {_W1: 105, _W2: 78, _W3: 0.023, _TTFT: 0.068},
    ("llama-3.2-1b", "bf16", "vllm"): {_W3: 0.0648, _W1S: 53},
    ("llama-3.2-1b", "bf16", "openvino"): {_W3: 0.0422, _W1S: 49},
    ("llama-3.2-1b", "bf16", "llama"): {_W3: 0.0391, _W1S: 28},
}  # fmt: skip
_READS_WEIGHTS = {_W3}
_MORE_IS_BETTER = {_W1, _W1S}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the machine does beside a run.

    Attributes:
        read_gb_per_s: Reading memory, all threads.
        gflop_per_s: Multiply-adds by kind of number, twice a multiply-add each; ``f32`` is always
            there, ``bf16`` where the processor has instructions for it.
    """

    read_gb_per_s: float
    gflop_per_s: dict[str, float]

    @property
    def is_like_the_table(self) -> bool:
        """Whether the processor multiplies bfloat16 by itself, as the table's did."""
        return "bf16" in self.gflop_per_s


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a peer's number compares with the table, scaled.

    Attributes:
        expected: The table's number on this machine.
        ratio: Measured speed by expected speed: above 1 is faster.
        mark: Empty, ``invalid`` or ``unproven``.
    """

    expected: float
    ratio: float
    mark: str


def scale(rates: Rates, workload: str, measure: str) -> float:
    """This machine's speed by the table's, for what bounds a workload."""
    bandwidth = rates.read_gb_per_s / READ_GB_PER_S
    if rates.is_like_the_table or (workload, measure) in _READS_WEIGHTS:
        return bandwidth
    return rates.gflop_per_s["f32"] / GFLOP_PER_S["bf16"]


def judge(
    key: tuple[str, str, str], workload: str, measure: str, value: float, rates: Rates
) -> Verdict | None:
    """Compare `value` with the table.

    Args:
        key: Model, precision and engine.
        workload: Of the measured run.
        measure: Name of the number, as in ``measures.py``.
        value: What was measured, above 0.
        rates: What the machine did beside it.

    Returns:
        ``None`` where the table has no such number.
    """
    known = TABLE.get(key, {}).get((workload, measure))
    if known is None:
        return None
    factor = scale(rates, workload, measure)
    more_is_better = (workload, measure) in _MORE_IS_BETTER
    expected = known * factor if more_is_better else known / factor
    ratio = value / expected if more_is_better else expected / value
    mark = ""
    if ratio < 1.0 - TOLERANCE:
        mark = "invalid" if rates.is_like_the_table else "unproven"
    return Verdict(expected, ratio, mark)
