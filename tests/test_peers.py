"""Of benches/peers, what runs no engine: workloads, measures, protocol, verdicts, documents."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from peers import load, report, settings, worker, workloads
from peers.__main__ import parse
from peers.engines import OnlineEngine
from peers.measures import measure, percentile
from peers.protocol import (
    Done,
    Failed,
    ProtocolError,
    Ready,
    Run,
    Stop,
    Track,
    decode_command,
    decode_event,
    encode,
)
from peers.reference import GFLOP_PER_S, READ_GB_PER_S, TABLE, Rates, judge
from peers.summary import COLUMNS, Table, render, tabulate
from peers.workloads import Request

REPOSITORY = Path(__file__).resolve().parent.parent
LIKE_THE_TABLE = Rates(read_gb_per_s=READ_GB_PER_S, gflop_per_s=GFLOP_PER_S)


def sizes(requests: list[Request]) -> tuple[int, int, int]:
    prompts = sum(len(request.prompt) for request in requests)
    return len(requests), prompts, sum(request.num_tokens for request in requests)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("W1", (64, 18_198, 4_521)),
        ("W2", (64, 64 * 1056, 64 * 32)),
        ("W3", (1, 128, 128)),
        ("W4", (9, 8 * 64 + 4096, 8 * 512 + 16)),
    ],
)
def test_workloads_have_the_sizes_of_the_table(name: str, expected: tuple[int, int, int]) -> None:
    assert sizes(workloads.build(name, 100)) == sizes(workloads.build(name, 101)) == expected


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_a_seed_is_the_same_work_and_another_seed_is_not(name: str) -> None:
    first, again, other = (workloads.build(name, seed, rate=3.0) for seed in (7, 7, 8))
    assert first == again
    assert not {tuple(r.prompt) for r in first} & {tuple(r.prompt) for r in other}
    assert len({request.name for request in first}) == len(first)


def test_w1s_is_the_beginning_of_w1() -> None:
    assert workloads.build("W1S", 3) == workloads.build("W1", 3)[:16]


def test_w2_shares_its_prefix_and_nothing_else() -> None:
    requests = workloads.build("W2", 1)
    assert len({tuple(request.prompt[:1024]) for request in requests}) == 1
    assert len({tuple(request.prompt[1024:]) for request in requests}) == len(requests)


def test_w5_arrives_at_its_rate() -> None:
    requests = workloads.build("W5", 1, rate=6.0, span_s=1000.0)
    assert all(0.0 < request.at_s < 1000.0 for request in requests)
    assert [r.at_s for r in requests] == sorted(r.at_s for r in requests)
    # 6,000 arrivals expected; the deviation of a Poisson count is its root.
    assert abs(len(requests) - 6000) < 4 * math.sqrt(6000)


def test_w5_wants_a_rate() -> None:
    with pytest.raises(ValueError, match="W5 wants requests a second"):
        workloads.build("W5", 1)


def test_a_trial_keeps_every_role() -> None:
    requests = workloads.build("W4", 1, scale=0.05)
    assert [request.role for request in requests] == ["stream", "long"]
    assert [len(request.prompt) for request in requests] == [8, 204]
    assert requests[1].at_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    "message",
    [
        Run([Request("a", 0.5, [1, 2], 3, "long")], 60.0),
        Stop(),
        Ready("engine 1.0", 0.25),
        Done(1.0, [Track("a", 1.5, [2.0, 2.5], [1, 2])], ["a: late"]),
        Failed("no memory"),
    ],
)
def test_messages_survive_the_way(message: Any) -> None:
    decode = decode_command if isinstance(message, Run | Stop) else decode_event
    assert decode(encode(message) + "\n") == message


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "cut short, or the process ended"),
        ('{"event": "ready", "version": "1"', "cut short"),
        ("Loading model\n", "want a JSON object whose 'event'"),
        ("[1]\n", "want a JSON object whose 'event'"),
        ('{"event": "steady"}\n', "one of ready, done, failed"),
        ('{"event": "ready", "version": "1"}\n', "load_s"),
        ('{"event": "done", "start_s": 0, "tracks": [{"nom": 1}], "problems": []}\n', "nom"),
        ("x" * 5000 + "\n", r"\(5001 characters\)"),
    ],
)
def test_what_is_no_event_is_named(line: str, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        decode_event(line)


class Counting(OnlineEngine):
    """Answers at once, `missing` tokens short."""

    version = "counting 1"

    def start(self) -> None:
        if self.options.get("broken"):
            raise RuntimeError("no such model")

    def submit(self, request: Request) -> None:
        for _ in range(request.num_tokens - self.options.get("missing", 0)):
            self.recorder.tokens(request.name, 1)
        self.recorder.finished(request.name)


def talk(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], commands: str) -> list[Any]:
    monkeypatch.setitem(worker.ENGINES, "counting", (__name__, "Counting"))
    events = io.StringIO()
    worker.serve("counting", options, io.StringIO(commands), events)
    return [decode_event(line + "\n") for line in events.getvalue().splitlines()]


COMMANDS = encode(Run([Request("a", 0.0, [5], 4)], 5.0)) + "\n" + encode(Stop()) + "\n"


def test_worker_answers_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ready, done = talk(monkeypatch, {}, COMMANDS)
    assert ready.version == "counting 1"
    assert done.problems == []
    (track,) = done.tracks
    assert track.num_tokens == 4
    assert track.times_s == sorted(track.times_s)
    assert done.start_s == track.submitted_s <= track.times_s[0]


def test_worker_says_which_tokens_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, done = talk(monkeypatch, {"missing": 1}, COMMANDS)
    assert done.problems == ["a: 3 tokens, wanted 4"]


def test_worker_says_why_it_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(worker.ENGINES, "counting", (__name__, "Counting"))
    events = io.StringIO()
    with pytest.raises(RuntimeError):
        worker.serve("counting", {"broken": True}, io.StringIO(), events)
    assert decode_event(events.getvalue()) == Failed("RuntimeError: no such model")


def test_percentiles_are_linear_between_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
    assert percentile([], 50) is None


def test_a_single_stream() -> None:
    # Three tokens in the second event: they have gaps of 1, 0 and 0.
    done = Done(10.0, [Track("w3", 10.0, [10.5, 11.5, 12.5], [1, 3, 1])], [])
    found = measure("W3", [Request("w3", 0.0, [1] * 7, 5)], done)
    assert found["num_prompt_tokens"] == 7
    assert found["wall_s"] == pytest.approx(2.5)
    assert found["tokens_per_s"] == pytest.approx(2.0)
    assert found["ttft_p50_s"] == pytest.approx(0.5)
    assert found["itl_mean_s"] == pytest.approx(0.5)


def test_the_worst_gap_is_the_one_beside_the_long_prompt() -> None:
    requests = [
        Request("s0", 0.0, [1], 9, "stream"),
        Request("s1", 0.0, [1], 9, "stream"),
        Request("long", 2.0, [1], 1, "long"),
    ]
    tracks = [
        # 1.0 → 2.0 ended before it came; 2.0 → 2.5 and 2.5 → 3.25 count; 4 → 9 began after it.
        Track("s0", 0.0, [1.0, 2.0, 2.5, 3.25, 4.0, 9.0], [1] * 6),
        Track("s1", 0.0, [0.5, 1.9, 2.4], [1] * 3),
        Track("long", 2.0, [3.5], [1]),
    ]
    found = measure("W4", requests, Done(0.0, tracks, []))
    assert found["long_ttft_s"] == pytest.approx(1.5)
    assert found["gap_worst_s"] == pytest.approx(0.75)
    assert found["gap_before_mean_s"] == pytest.approx((1.0 + 1.4) / 2)
    assert (found["num_streams"], found["num_streams_to_the_end"]) == (2, 1)


def test_goodput_counts_whole_answers_in_time() -> None:
    requests = [Request(name, 0.0, [1], 3) for name in ("good", "late", "slow", "cut")]
    tracks = [
        Track("good", 0.0, [0.9, 0.95, 1.0], [1, 1, 1]),
        Track("late", 0.0, [1.1, 1.2, 1.3], [1, 1, 1]),
        Track("slow", 0.0, [0.1, 0.2, 0.5], [1, 1, 1]),
        Track("cut", 0.0, [0.1, 0.2], [1, 1]),
    ]
    found = measure("W5", requests, Done(0.0, tracks, ["timeout: 1 requests unfinished"]))
    assert (found["num_requests"], found["num_good"]) == (4, 1)
    assert found["goodput_per_s"] == pytest.approx(1 / 1.3)


def test_no_answer_at_all_is_no_number() -> None:
    found = measure("W1", [Request("a", 0.0, [1], 2)], Done(0.0, [Track("a", 0.0)], ["timeout"]))
    assert found["wall_s"] is found["tokens_per_s"] is found["ttft_p50_s"] is None


VLLM = ("smollm2", "bf16", "vllm")


def test_a_peer_as_fast_as_the_table_is_valid() -> None:
    for key, numbers in TABLE.items():
        for (workload, name), value in numbers.items():
            verdict = judge(key, workload, name, value, LIKE_THE_TABLE)
            assert verdict is not None
            assert (verdict.mark, verdict.ratio) == ("", pytest.approx(1.0))


@pytest.mark.parametrize(
    ("workload", "name", "value", "mark"),
    [
        ("W1", "tokens_per_s", 0.86 * 421, ""),
        ("W1", "tokens_per_s", 0.84 * 421, "invalid"),
        ("W3", "itl_mean_s", 0.0122 / 0.86, ""),
        ("W3", "itl_mean_s", 0.0122 / 0.84, "invalid"),
    ],
)
def test_over_15_percent_slower_is_invalid(
    workload: str, name: str, value: float, mark: str
) -> None:
    verdict = judge(VLLM, workload, name, value, LIKE_THE_TABLE)
    assert verdict is not None
    assert verdict.mark == mark


def test_the_table_is_scaled_by_bandwidth() -> None:
    half = Rates(read_gb_per_s=READ_GB_PER_S / 2, gflop_per_s=GFLOP_PER_S)
    for workload, name, expected in (("W1", "tokens_per_s", 210.5), ("W2", "wall_s", 6.4)):
        verdict = judge(VLLM, workload, name, expected, half)
        assert verdict is not None
        assert verdict.expected == pytest.approx(expected)


def test_without_bf16_products_are_scaled_by_the_float32_rate() -> None:
    plain = Rates(read_gb_per_s=READ_GB_PER_S / 2, gflop_per_s={"f32": 99.6})
    products = judge(VLLM, "W1", "tokens_per_s", 30.0, plain)
    reading = judge(VLLM, "W3", "itl_mean_s", 0.020, plain)
    assert products is not None
    assert reading is not None
    assert products.expected == pytest.approx(42.1)
    assert products.mark == "unproven"
    assert reading.expected == pytest.approx(0.0244)
    assert reading.mark == ""


def test_nothing_is_expected_of_what_the_table_lacks() -> None:
    assert (
        judge(("smollm2", "bf16", "fastserve"), "W1", "tokens_per_s", 1.0, LIKE_THE_TABLE) is None
    )


def row(**changes: Any) -> dict[str, Any]:
    made = {
        "machine": "a machine",
        "commit": "abc1234",
        "model": "smollm2",
        "precision": "bf16",
        "num_threads": 2,
        "scale": 1.0,
        "engine": "vllm",
        "version": "vllm 0.32.0",
        "workload": "W1",
        "rate": 0.0,
        "round": 0,
        "num_tokens": 4521,
        "num_wanted_tokens": 4521,
        "tokens_per_s": 400.0,
        "first_token_s": 50.0,
        "peak_bytes": 7e9,
        "disturbed": False,
        "read_gb_per_s": READ_GB_PER_S,
        "gflop_per_s": GFLOP_PER_S,
    }
    return {**made, **changes}


def speed_cell(rows: list[dict[str, Any]]) -> Any:
    (table,) = tabulate(rows)
    return table.cells[rows[0]["engine"]]["W1.tokens_per_s"]


def test_disturbed_runs_are_left_out_of_a_median() -> None:
    rows = [row(tokens_per_s=v, disturbed=d) for v, d in ((400, False), (10, True), (420, False))]
    cell = speed_cell(rows)
    assert (cell.value, cell.num_runs, cell.mark) == (410.0, 2, "")


def test_a_cell_of_disturbed_runs_alone_says_so() -> None:
    assert speed_cell([row(disturbed=True, tokens_per_s=10.0)]).mark == "disturbed"


def test_missing_tokens_outweigh_every_other_mark() -> None:
    assert speed_cell([row(num_tokens=4520, disturbed=True)]).mark == "incomplete"


def test_a_slow_peer_is_marked_and_our_own_engine_is_not() -> None:
    slow = speed_cell([row(tokens_per_s=200.0)])
    assert (slow.mark, slow.expected) == ("invalid", pytest.approx(421.0))
    assert speed_cell([row(engine="fastserve", tokens_per_s=1.0)]).mark == ""


def test_memory_is_what_a_process_took_to_its_end() -> None:
    rows = [
        row(workload=workload, round=number, peak_bytes=peak, disturbed=workload == "W4")
        for number, peaks in enumerate([(1e9, 4e9), (2e9, 6e9), (1e9, 5e9)])
        for workload, peak in zip(("W3", "W4"), peaks, strict=True)
    ]
    (table,) = tabulate(rows)
    cell = table.cells["vllm"]["all.peak_bytes"]
    assert (cell.value, cell.num_runs) == (5e9, 3)


def all_columns() -> list[dict[str, Any]]:
    names = {column.workload: {} for column in COLUMNS if column.workload}
    for column in COLUMNS:
        if column.workload:
            is_rate = column.measure == "tokens_per_s"
            names[column.workload][column.measure] = 1234.5678 if is_rate else 9.8765
    online = {f"{kind}_{p}_s": 1.0 for kind in ("ttft", "tpot") for p in ("p50", "p99")}
    names["W5"] = {**online, "goodput_per_s": 2.5, "rate": 3.0}
    return [
        row(workload=workload, engine=engine, version=f"{engine} 1", **values)
        for engine in settings.PEERS
        for workload, values in names.items()
        if workload != "W1S"
    ]


def test_the_table_has_80_columns() -> None:
    (table,) = tabulate(all_columns())
    text = render(table, {"llama": "no compiler"})
    grid = text.split("\n\n")[1:3]
    assert all(len(line) <= 80 for part in grid for line in part.splitlines())
    assert "llama: left out: no compiler" in text


def test_medians_survive_the_file() -> None:
    (table,) = tabulate(all_columns())
    assert Table.from_json(table.as_json()) == table


def test_trials_and_older_commits_are_not_reported() -> None:
    rows = [row(commit="old"), row(round=0), row(round=1), row(scale=0.1, commit="trial")]
    assert report.newest(rows) == rows[1:3]
    assert report.newest([row(scale=0.5)]) == []


def test_the_document_has_the_table_of_the_medians() -> None:
    document = report.DOCUMENT.read_text()
    assert (
        report.inserted(document, report.markdown(report.read_medians(report.MEDIANS))) == document
    )


def test_the_document_has_the_settings_in_force() -> None:
    document = report.DOCUMENT.read_text()
    assert report.inserted(document, report.settings_table(), report.SETTINGS) == document


def test_a_document_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="no <!-- results -->"):
        report.inserted("no marks here", "text")


@pytest.mark.parametrize("name", settings.PEERS)
def test_every_engine_has_one_setting_for_a_workload(name: str) -> None:
    peer = settings.PEERS[name]
    covered = [workload for setting in peer.settings for workload in setting.workloads]
    assert len(covered) == len(set(covered))
    assert set(covered) <= set(workloads.WORKLOADS)
    assert peer.adapter in worker.ENGINES


def test_command_line_defaults_follow_the_precision() -> None:
    assert parse(["--precision", "int8"]).engines == list(settings.DEFAULT_ENGINES["int8"])
    assert parse(["--engines", "llama", "--work", "W3"]).engines == ["llama"]


@pytest.mark.parametrize("bad", [["--engines", "vlm"], ["--work", "W9"], ["--runs", "0"]])
def test_command_line_refuses(bad: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(bad)


def test_requirements_are_pinned() -> None:
    for path in (REPOSITORY / "benches" / "peers" / "requirements").glob("*.txt"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert lines
        assert all(line.count("==") == 1 for line in lines), path.name


def test_other_programs_use_what_the_family_does_not() -> None:
    before, now = load.CpuTime(100.0, 10.0), load.CpuTime(104.0, 13.0)
    assert now.other_cores(before, 2.0) == pytest.approx(0.5)
    assert now.own_cores(before, 2.0) == pytest.approx(1.5)
