"""The command line as a process: Ctrl-C, a terminal, signals, a reader that goes away."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from model_factory import make

COMMAND = [sys.executable, "-m", "fastserve"]
ENGINE = ["--dtype", "float32", "--num-blocks", "4096", "--num-threads", "1"]
ENDLESS = ["--max-tokens", "100000", "--ignore-eos", "--temperature", "1"]
PATIENCE_S = 120
ENVIRONMENT = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1", "TERM": "xterm"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a window so long that its answers do not end by themselves."""
    return make("llama", tmp_path_factory.mktemp("models"), max_position_embeddings=65536)


class Process:
    """A command whose output can be waited for."""

    def __init__(self, *arguments: str, **how: Any) -> None:
        self.popen = subprocess.Popen(
            [*COMMAND, *arguments],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **how,
        )

    def interrupt(self) -> None:
        self.popen.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str, str]:
        """Exit code, the rest of stdout, and stderr."""
        out, err = self.popen.communicate(timeout=PATIENCE_S)
        return self.popen.returncode, out.decode(), err.decode()


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts processes; none outlives its test."""
    started: list[Process] = []

    def run(*arguments: str, **how: Any) -> Process:
        started.append(Process(*arguments, **how))
        return started[-1]

    yield run
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait()
        for pipe in (process.popen.stdin, process.popen.stdout, process.popen.stderr):
            pipe.close()


def test_generate_in_one_command(folder: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "generate", str(folder), "-", "--max-tokens", "3", *ENGINE],
        input="hello",
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert re.fullmatch(r"3 tokens in .*, first .* s, cached 0/\d+ .*\ncut .*\n", done.stderr)


@pytest.mark.parametrize(
    ("redirection", "arguments", "code", "error"),
    [
        ("<&-", ["-"], 2, "error: prompt is empty; "),
        (">&-", ["hi", "--max-tokens", "2"], 0, "2 tokens in "),
        ("", [b"ab\xffc"], 2, "error: prompt is not UTF-8: byte 0xff after 2 characters; "),
        ("", ["hi", "--num-threads", "1025"], 2, "error: --num-threads 1025: want 1 to 1024"),
    ],
)
def test_what_a_shell_may_hand_on(
    folder: Path, redirection: str, arguments: list[str | bytes], code: int, error: str
) -> None:
    command = [*COMMAND, "generate", folder, *ENGINE, *arguments]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command],
        env=ENVIRONMENT,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, b"")
    assert done.stderr.decode().startswith(error)
    assert "Traceback" not in done.stderr.decode()


@pytest.mark.parametrize("isa", ["bogus", "avx513"])
def test_an_instruction_set_that_is_not_here_is_one_line(folder: Path, isa: str) -> None:
    done = subprocess.run(
        [*COMMAND, "generate", str(folder), "hi", *ENGINE],
        env=ENVIRONMENT | {"FASTSERVE_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    want = rf"error: FASTSERVE_CPU_ISA is '{isa}': this machine has portable.*; choose .*unset it\n"
    assert re.fullmatch(want, done.stderr)


def test_ctrl_c_ends_generate_without_a_traceback(start: Any, folder: Path) -> None:
    process = start("generate", str(folder), "hi", *ENDLESS, *ENGINE)
    assert process.popen.stdout.read(20)  # It is in the middle of its answer.
    process.interrupt()
    code, _, err = process.end()
    assert (code, err) == (130, "")


def test_a_reader_that_goes_away_ends_generate_quietly(start: Any, folder: Path) -> None:
    process = start("generate", str(folder), "hi", *ENDLESS, *ENGINE)
    assert process.popen.stdout.read(20)
    process.popen.stdout.close()
    assert process.popen.stderr.read() == b""
    assert process.popen.wait(PATIENCE_S) == 141


CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """A process on a pseudo-terminal, and what it has shown so far."""

    def __init__(self, *arguments: str) -> None:
        self._master, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.popen = subprocess.Popen(
            [*COMMAND, *arguments],
            env=ENVIRONMENT,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            preexec_fn=_own_terminal,
        )
        os.close(terminal)
        self.shown = ""

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read until `pattern` is in what was shown since the last call, and forget up to it."""
        with self._watched():
            try:
                while not (match := re.search(pattern, self.shown)):
                    self.shown += os.read(self._master, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended before {pattern!r}: {self.shown!r}") from None
        self.shown = self.shown[match.end() :]
        return match

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Reading waits for ever; a process that says nothing for long is killed."""
        watchdog = threading.Timer(PATIENCE_S, self.popen.kill)
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def leave(self) -> int:
        """Ctrl-C at the prompt. Returns the exit code.

        CPython notices one that comes between its writing the prompt and its waiting for a key only
        with the next key: so another one, if nothing has come for long.
        """
        for _ in range(5):
            self.type(CTRL_C)
            if select.select([self._master], [], [], PATIENCE_S / 5)[0]:
                break
        return self.end()

    def end(self) -> int:
        """Read to the end. Returns the exit code."""
        with self._watched(), suppress(OSError):  # How Linux says that nobody has it open any more.
            while piece := os.read(self._master, 4096):
                self.shown += piece.decode(errors="replace")
        os.close(self._master)
        assert "Traceback" not in self.shown
        return self.popen.wait(PATIENCE_S)


def _own_terminal() -> None:
    """Make stdin the controlling terminal, so that ^C on it is a signal."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(folder: Path) -> Iterator[Any]:
    started: list[Terminal] = []

    def run(*arguments: str) -> Terminal:
        started.append(Terminal(*arguments, *ENGINE))
        return started[-1]

    yield run
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait()


def test_chat_on_a_terminal(terminal: Any, folder: Path) -> None:
    chat = terminal("chat", str(folder), *ENDLESS)
    chat.wait_for("/help lists the commands")
    chat.wait_for("> ")
    chat.type("hello\n")
    chat.wait_for(r"hello\r\n")
    chat.wait_for(r"\S+")  # The answer is under way.
    chat.type(CTRL_C)
    chat.wait_for("stopped")
    chat.wait_for("> ")  # The program goes on ...
    chat.type("/reset\n")
    chat.wait_for("the conversation starts anew")
    chat.wait_for("> ")
    assert chat.leave() == 130  # ... until Ctrl-C where there is no answer to stop.


def test_ctrl_c_while_loading_ends_without_a_traceback(terminal: Any, folder: Path) -> None:
    chat = terminal("chat", str(folder))
    chat.wait_for("loading")
    chat.type(CTRL_C)
    assert chat.end() == 130


def test_ctrl_d_leaves_chat(terminal: Any, folder: Path) -> None:
    chat = terminal("chat", str(folder), "--max-tokens", "4", "--ignore-eos")
    chat.wait_for("> ")
    chat.type("hello\n")
    chat.wait_for(r"4 tokens in .*cached 0/")
    chat.wait_for("> ")
    chat.type("and again\n")
    chat.wait_for(r"4 tokens in .*cached [1-9]\d*/")
    chat.wait_for("> ")
    chat.type(CTRL_D)
    assert chat.end() == 0


class Serving:
    """``fastserve serve`` on a free port."""

    def __init__(self, start: Any, folder: Path, *arguments: str) -> None:
        self.process = start("serve", str(folder), "--port", "0", *arguments, *ENGINE)
        lines = iter(self.process.popen.stderr.readline, b"")
        ready = next(line.decode() for line in lines if b"serving" in line)
        self.url = re.search(r"at (http://127\.0\.0\.1:\d+/v1); Ctrl-C stops it", ready)[1]

    def open_stream(self) -> Iterator[str]:
        """Lines of an answer that does not end by itself; the first one has come."""
        body = {"prompt": "x", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
        client = httpx.Client(timeout=PATIENCE_S)
        response = client.send(
            client.build_request("POST", f"{self.url}/completions", json=body), stream=True
        )
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        return lines


def test_serve_answers_and_ctrl_c_stops_it_with_streams_open(start: Any, folder: Path) -> None:
    serving = Serving(start, folder, "--served-model-name", "tiny")
    with openai.OpenAI(base_url=serving.url, api_key="none") as client:
        answer = client.completions.create(model="tiny", prompt="x", max_tokens=3)
        assert answer.usage.completion_tokens <= 3
    lines = serving.open_stream()
    serving.process.interrupt()
    last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "aborted"
    code, out, err = serving.process.end()
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    assert re.search(
        r"info +/v1/completions 200: \d+ prompt tokens \(0 cached\), \d generated", err
    )


def test_sigterm_lets_running_requests_finish(start: Any, folder: Path) -> None:
    serving = Serving(start, folder)
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{serving.url}/completions", json=body, timeout=PATIENCE_S
    ) as response:
        lines = response.iter_lines()
        next(lines)
        serving.process.popen.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    code, _, err = serving.process.end()
    assert code == 0
    assert "Traceback" not in err


def test_a_second_signal_stops_a_drain(start: Any, folder: Path) -> None:
    serving = Serving(start, folder)
    lines = serving.open_stream()
    serving.process.popen.send_signal(signal.SIGTERM)
    for line in serving.process.popen.stderr:
        if b"another signal stops at once" in line:
            break
    serving.process.popen.send_signal(signal.SIGTERM)
    assert '"aborted"' in [line for line in lines if line][-1]
    assert serving.process.end()[0] == 0


def test_a_drain_that_takes_too_long_tells_its_clients(start: Any, folder: Path) -> None:
    serving = Serving(start, folder, "--shutdown-timeout-s", "1")
    lines = serving.open_stream()
    serving.process.popen.send_signal(signal.SIGTERM)
    last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "aborted"
    code, _, err = serving.process.end()
    assert code == 0
    assert "Traceback" not in err
    assert " 503" in err


def test_a_port_in_use_is_one_line_before_anything_is_loaded(start: Any, folder: Path) -> None:
    serving = Serving(start, folder)
    port = serving.url.rpartition(":")[2].removesuffix("/v1")
    code, out, err = start("serve", str(folder), "--port", port).end()
    assert (code, out) == (1, "")
    assert err == (
        f"error: cannot listen on 127.0.0.1:{port}: address already in use; "
        "choose another --host or --port\n"
    )
