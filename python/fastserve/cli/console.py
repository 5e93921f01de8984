"""What the commands print besides their answer: errors, the loading bar, notes. All on stderr."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from fastserve.errors import ConfigError, FastserveError
from fastserve.extras import BASE
from fastserve.sampling_params import ParameterError

__all__ = [
    "CommandError",
    "CommandFailed",
    "one_line_errors",
    "print_error",
    "print_note",
    "reader_gone",
    "stderr",
]

FAILED = 1
BAD_INPUT = 2
READER_GONE = 141

stderr = Console(stderr=True, highlight=False)


class CommandError(Exception):
    """The command line was used in a way that cannot work; the message says what to do."""


class CommandFailed(Exception):
    """What was asked for could not be done; the message says why."""


def print_error(message: str) -> None:
    """One line, whatever the terminal's width: it may be searched for, or copied."""
    line = " ".join(message.split())
    stderr.print(Text.assemble(("error: ", "bold red"), line), soft_wrap=True)


def print_note(message: str) -> None:
    """A dim line beside the answer; a terminal breaks it between words, a file not at all."""
    stderr.print(Text(message, style="dim"), soft_wrap=not stderr.is_terminal)


def reader_gone() -> int:
    """Whoever read stdout has closed it: be quiet about it. Returns the exit code."""
    # Python flushes stdout once more when it exits; let it have something that takes it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return READER_GONE


def _as_flag(problem: str) -> str:
    """``block_size=7: want …`` in the words of who typed ``--block-size 7``."""
    match = re.fullmatch(r"(\w+)=(.*?): (.*)", problem)
    return f"--{match[1].replace('_', '-')} {match[2]}: {match[3]}" if match else problem


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what a user can mend into one line and an exit code. A bug keeps its traceback."""
    try:
        yield
    except BrokenPipeError:
        raise typer.Exit(reader_gone()) from None
    except CommandError as error:
        print_error(str(error))
        raise typer.Exit(BAD_INPUT) from None
    except CommandFailed as error:
        print_error(str(error))
        raise typer.Exit(FAILED) from None
    except (ConfigError, ParameterError) as error:
        print_error("; ".join(map(_as_flag, error.problems)))
        raise typer.Exit(BAD_INPUT) from None
    except FastserveError as error:
        # A caller's mistake, or a failure at run time.
        print_error(str(error))
        raise typer.Exit(FAILED if isinstance(error, RuntimeError) else BAD_INPUT) from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "fastserve":
            raise  # A bug.
        remedy = f"; install it with: pip install {package}" if package in BASE else ""
        print_error(f"{error}{remedy}")
        raise typer.Exit(FAILED) from None
    except (ImportError, OSError) as error:
        # A missing extra, a full disk, a port in use.
        print_error(str(error))
        raise typer.Exit(FAILED) from None
    except MemoryError as error:
        said = str(error) or "choose a smaller model, --num-blocks or --max-model-len"
        print_error(f"out of memory; {said}")
        raise typer.Exit(FAILED) from None
