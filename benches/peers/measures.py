"""From what callers saw to the numbers of a run. Seconds everywhere."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TypeAlias

from peers.protocol import Done, Track
from peers.workloads import Request

MAX_TTFT_S = 1.0
MAX_TPOT_S = 0.1
"""W5 counts as good: the first token within the one, the others on average within the other."""

Measures: TypeAlias = dict[str, float | int | None]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest; ``None`` of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def gaps(track: Track) -> list[float]:
    """Times between tokens. Tokens that arrive together have gaps of 0 between them."""
    found: list[float] = []
    for before, now, count in zip(track.times_s, track.times_s[1:], track.counts[1:], strict=False):
        found += [now - before] + [0.0] * (count - 1)
    return found


def measure(name: str, requests: Sequence[Request], done: Done) -> Measures:
    """Numbers of one run of the workload `name`.

    ``wall_s`` is from the workload's start to the last token that anybody saw. TPOT is a request's
    mean time a token after its first event.
    """
    tracks = {track.name: track for track in done.tracks}
    ends = [track.times_s[-1] for track in done.tracks if track.times_s]
    wall_s = max(ends) - done.start_s if ends else None
    num_tokens = sum(track.num_tokens for track in done.tracks)
    ttft = [track.times_s[0] - track.submitted_s for track in done.tracks if track.times_s]
    tpot = [value for value in map(_tpot, done.tracks) if value is not None]
    found: Measures = {
        "wall_s": wall_s,
        "num_prompt_tokens": sum(len(request.prompt) for request in requests),
        "num_tokens": num_tokens,
        "num_wanted_tokens": sum(request.num_tokens for request in requests),
        "tokens_per_s": num_tokens / wall_s if wall_s else None,
        "ttft_p50_s": percentile(ttft, 50),
        "ttft_p99_s": percentile(ttft, 99),
        "tpot_p50_s": percentile(tpot, 50),
        "tpot_p99_s": percentile(tpot, 99),
    }
    if name == "W3":
        found |= _single(done.tracks[0])
    elif name == "W4":
        found |= _interrupted(requests, tracks)
    elif name == "W5":
        found |= _online(requests, tracks, wall_s)
    return found


def _tpot(track: Track) -> float | None:
    if track.num_tokens < 2 or len(track.times_s) < 2:
        return None
    later = track.num_tokens - track.counts[0]
    return (track.times_s[-1] - track.times_s[0]) / later


def _single(track: Track) -> Measures:
    between = gaps(track)
    return {
        "itl_mean_s": statistics.fmean(between) if between else None,
        "itl_p99_s": percentile(between, 99),
    }


def _interrupted(requests: Sequence[Request], tracks: dict[str, Track]) -> Measures:
    """W4: gaps of the streams while the long prompt was waiting for its first token."""
    long = tracks[next(request.name for request in requests if request.role == "long")]
    begin = long.submitted_s
    end = long.times_s[0] if long.times_s else math.inf
    streams = [tracks[request.name] for request in requests if request.role == "stream"]
    before: list[float] = []
    during: list[float] = []
    for track in streams:
        for earlier, later in zip(track.times_s, track.times_s[1:], strict=False):
            if later <= begin:
                before.append(later - earlier)
            elif earlier < end:
                during.append(later - earlier)
    return {
        "long_ttft_s": end - begin if long.times_s else None,
        "gap_before_mean_s": statistics.fmean(before) if before else None,
        "gap_worst_s": max(during, default=None),
        "gap_p99_s": percentile(during, 99),
        "num_streams": len(streams),
        "num_streams_to_the_end": sum(
            bool(track.times_s) and track.times_s[-1] > end for track in streams
        ),
    }


def _online(
    requests: Sequence[Request], tracks: dict[str, Track], wall_s: float | None
) -> Measures:
    good = 0
    for request in requests:
        track = tracks[request.name]
        if track.num_tokens == request.num_tokens:
            ttft = track.times_s[0] - track.submitted_s
            good += ttft <= MAX_TTFT_S and (_tpot(track) or 0.0) <= MAX_TPOT_S
    last_arrival = max((request.at_s for request in requests), default=0.0)
    span_s = max(wall_s or 0.0, last_arrival)
    return {
        "num_requests": len(requests),
        "num_good": good,
        "goodput_per_s": good / span_s if span_s else None,
    }
