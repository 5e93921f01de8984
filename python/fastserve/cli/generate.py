"""``fastserve generate``: one answer, streamed; or several, in order."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastserve.cli.console import CommandError, one_line_errors, print_note
from fastserve.cli.flags import takes
from fastserve.cli.options import LogLevelOption, ModelArgument, set_log_level
from fastserve.cli.session import (
    Prompt,
    check_needs,
    check_utf8,
    loaded,
    prompt_of,
    stream,
    summary,
)
from fastserve.cli.typewriter import Typewriter
from fastserve.config import EngineConfig
from fastserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from fastserve.async_engine import AsyncEngine
    from fastserve.outputs import RequestOutput

__all__ = ["NOT_SAMPLING_HERE", "generate", "takes_engine"]

NOT_SAMPLING_HERE = ("n", "logprobs", "prompt_logprobs", "spaces_between_special_tokens")
"""Sampling parameters whose results the terminal does not show."""

takes_engine = takes(
    "engine",
    EngineConfig,
    panel="Engine",
    # One reader, whose text comes after its own prompt: nobody is kept waiting by another's.
    defaults={"target_itl_ms": None},
    # The sampling parameters have the one already, and without the other there is no text to show.
    leave_out=("seed", "skip_tokenizer_init"),
)
"""Engine options of a command that answers in the terminal."""


@takes_engine
@takes(
    "sampling",
    SamplingParams,
    panel="Sampling",
    defaults={"max_tokens": 256, "temperature": 0.0},
    leave_out=NOT_SAMPLING_HERE,
)
def generate(
    model: ModelArgument,
    prompt: Annotated[
        str | None, typer.Argument(help="What to say to the model; - reads it from stdin.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", "-p", metavar="TEXT", help="A prompt. May be given several times."
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message that goes before the prompt.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the bare text, without chat template.")
    ] = False,
    log_level: LogLevelOption = None,
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Answer PROMPT: the text goes to stdout as it comes, a summary to stderr.

    Several prompts run together and are printed in order.
    """
    set_log_level(log_level)
    with one_line_errors():
        texts = _texts(prompt, prompts or [])
        if raw and system is not None:
            raise CommandError("--system needs the chat template; leave out --raw")
        params = SamplingParams(**sampling)
        check_needs("fastserve generate", model)
        with loaded(model, engine) as running, asyncio.Runner() as runner:
            start = [{"role": "system", "content": system}] if system is not None else []
            conversations = [[*start, {"role": "user", "content": text}] for text in texts]
            jobs = [prompt_of(running, messages, raw=raw) for messages in conversations]
            started = time.perf_counter()
            try:
                outputs = runner.run(_answer(running, jobs, params, Typewriter().write))
            except KeyboardInterrupt:
                Typewriter().write("\n")
                raise
            print_note(summary(outputs, time.perf_counter() - started))


def _texts(prompt: str | None, prompts: list[str]) -> list[str]:
    given = [*([] if prompt is None else [prompt]), *prompts]
    if not given:
        raise CommandError("no prompt; give PROMPT, --prompt TEXT, or - to read it from stdin")
    texts = [sys.stdin.read() if text == "-" else text for text in given]
    for text in texts:
        check_utf8("prompt", text)
    # The chat template makes tokens of nothing, too, and the model would answer that.
    if not all(texts):
        raise CommandError(
            "prompt is empty; give some text as PROMPT, as --prompt TEXT or on stdin"
        )
    return texts


async def _answer(
    engine: AsyncEngine,
    jobs: list[Prompt],
    params: SamplingParams,
    write: Callable[[str], None],
) -> list[RequestOutput]:
    if len(jobs) == 1:
        output = await stream(engine, jobs[0], params, write)
        write("\n")
        return [output]
    tasks = [asyncio.create_task(stream(engine, job, params, lambda _: None)) for job in jobs]
    try:
        for number, task in enumerate(tasks, start=1):
            output = await task
            print_note(f"[{number} of {len(tasks)}]")
            write(output.outputs[0].text + "\n")
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
