"""``fastserve chat``: a conversation in the terminal.

Ctrl-C stops what is running: the answer if one is being written, otherwise the program. What an
interrupted answer had said stays in the conversation.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastserve.cli.console import CommandFailed, one_line_errors, print_error, print_note
from fastserve.cli.flags import takes
from fastserve.cli.generate import NOT_SAMPLING_HERE, takes_engine
from fastserve.cli.options import LogLevelOption, ModelArgument, set_log_level
from fastserve.cli.session import check_needs, loaded, prompt_of, stream, summary, tokenizer_of
from fastserve.cli.typewriter import Typewriter
from fastserve.errors import FastserveError, ModelError
from fastserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from fastserve.async_engine import AsyncEngine

__all__ = ["chat"]

PROMPT = "> "
HELP = """\
/reset  forget the conversation
/help   this
/exit   leave (Ctrl-D too)
Ctrl-C stops an answer; at the prompt it leaves."""


@takes_engine
@takes(
    "sampling",
    SamplingParams,
    panel="Sampling",
    defaults={"max_tokens": None, "temperature": 0.5, "top_p": 0.9},
    leave_out=NOT_SAMPLING_HERE,
)
def chat(
    model: ModelArgument,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="System message that comes first."),
    ] = None,
    log_level: LogLevelOption = None,
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Talk with MODEL. Earlier turns are found in the prefix cache, as each summary shows."""
    set_log_level(log_level)
    with one_line_errors():
        params = SamplingParams(**sampling)
        check_needs("fastserve chat", model)
        with loaded(model, engine) as running, asyncio.Runner() as runner:
            if not tokenizer_of(running).has_chat_template:
                raise ModelError(f"{model} has no chat template; use `fastserve generate`")
            Conversation(running, runner, params, system).talk()


class Conversation:
    """The turns so far, and the loop that adds to them."""

    def __init__(
        self,
        engine: AsyncEngine,
        runner: asyncio.Runner,
        params: SamplingParams,
        system: str | None,
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._params = params
        self._start = [{"role": "system", "content": system}] if system is not None else []
        self._turns = self._start.copy()

    def talk(self) -> None:
        """Read, answer, repeat, until the user leaves."""
        if sys.stdin.isatty():
            _enable_line_editing()
            print_note("/help lists the commands")
        while (line := _read_line()) is not None:
            said = line.strip()
            if said.startswith("/"):
                if said in {"/exit", "/quit", "/bye"}:
                    return
                self._command(said)
            elif said:
                self._answer(said)

    def _command(self, command: str) -> None:
        if command == "/reset":
            self._turns = self._start.copy()
            print_note("the conversation starts anew")
        elif command == "/help":
            print_note(HELP)
        else:
            print_error(f"no command {command}; /help lists them")

    def _answer(self, said: str) -> None:
        turns = [*self._turns, {"role": "user", "content": said}]
        pieces: list[str] = []
        typewriter = Typewriter()

        def write(text: str) -> None:
            pieces.append(text)
            typewriter.write(text)

        started = time.perf_counter()
        try:
            prompt = prompt_of(self._engine, turns, raw=False)
            with _no_echo():
                output = self._runner.run(stream(self._engine, prompt, self._params, write))
        except KeyboardInterrupt:
            note = "stopped"
        except (FastserveError, CommandFailed) as error:
            print_error(f"{error} (/reset starts a new conversation)")
            return
        else:
            note = summary([output], time.perf_counter() - started)
        typewriter.write("\n")
        print_note(note)
        self._turns = [*turns, {"role": "assistant", "content": "".join(pieces).strip()}]


def _enable_line_editing() -> None:
    """Arrow keys and the lines typed before, where Python has readline."""
    try:
        import readline  # noqa: F401  (importing it is what turns it on)
    except ImportError:
        return


@contextmanager
def _no_echo() -> Iterator[None]:
    """Keep what is typed during an answer out of it. It is there at the next prompt."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    place = sys.stdin.fileno()
    before = termios.tcgetattr(place)
    quiet = before.copy()
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(place, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(place, termios.TCSADRAIN, before)


def _read_line() -> str | None:
    """What the user typed, ``None`` at the end of the input."""
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    try:
        return input(PROMPT)
    except EOFError:
        sys.stdout.write("\n")
        return None
