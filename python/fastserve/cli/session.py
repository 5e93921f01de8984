"""A loaded model for as long as a command lasts, and answers from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from fastserve.cli.console import CommandError, CommandFailed, stderr
from fastserve.extras import require
from fastserve.surrogates import half_pair

if TYPE_CHECKING:
    from fastserve.async_engine import AsyncEngine
    from fastserve.outputs import RequestOutput
    from fastserve.sampling_params import SamplingParams
    from fastserve.text.tokenizer import Tokenizer

__all__ = [
    "Prompt",
    "check_needs",
    "check_utf8",
    "loaded",
    "prompt_of",
    "stream",
    "summary",
    "tokenizer_of",
]

Prompt = dict[str, Any]


def check_needs(command: str, model: str, *extras: str) -> None:
    """Refuse what `command` could not do anyway, before it begins: in the words of who typed it.

    Raises:
        ModelError: There can be no such model.
        ImportError: Something is not installed; names all of it.
    """
    from fastserve.models.resolve import check_name  # Late: numpy, which --help does without.

    check_name(model)
    require(command, *extras)


def check_utf8(what: str, text: str) -> None:
    """Refuse bytes that are no UTF-8, which the shell hands on as halves of surrogate pairs.

    Raises:
        CommandError: There are some; says where.
    """
    if (half := half_pair(text)) is None:
        return
    byte = ord(half[0]) - 0xDC00
    found = f"byte 0x{byte:02x}" if 0x80 <= byte <= 0xFF else "half of a surrogate pair"
    raise CommandError(
        f"{what} is not UTF-8: {found} after {half.start()} characters; convert it, with iconv say"
    )


@contextmanager
def loaded(model: str, options: dict[str, Any]) -> Iterator[AsyncEngine]:
    """The engine over `model`, shut down at the end of the block. Shows a bar while it loads."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(text_format_no_percentage=""),
        TimeElapsedColumn(),
    )
    hidden = not stderr.is_terminal
    with Progress(*columns, console=stderr, transient=True, disable=hidden) as bar:
        task = bar.add_task(f"loading {_short(model)}", total=None)
        from fastserve.async_engine import AsyncEngine  # Late, and while something moves.

        def progress(num_done: int, num_total: int) -> None:
            bar.update(task, completed=num_done, total=num_total)

        engine = AsyncEngine(model, progress=progress, **options)
    try:
        yield engine
    finally:
        engine.shutdown()


def _short(model: str, width: int = 28) -> str:
    return model if len(model) <= width else "…" + model[1 - width :]


def prompt_of(engine: AsyncEngine, messages: list[dict[str, str]], *, raw: bool) -> Prompt:
    """The token ids of a conversation: by the model's template, or the bare text if it has none."""
    tokenizer = tokenizer_of(engine)
    if raw or not tokenizer.has_chat_template:
        text = "\n".join(message["content"] for message in messages)
        return {"prompt_token_ids": tokenizer.encode(text)}
    return {"prompt_token_ids": tokenizer.apply_chat_template(messages)}


def tokenizer_of(engine: AsyncEngine) -> Tokenizer:
    """The engine's: no command leaves it out."""
    assert engine.tokenizer is not None
    return engine.tokenizer


def summary(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """A line that fits 80 columns: tokens, tokens/s, time to first token, cached tokens.

    Another line says where the length limit cut an answer.
    """
    num_tokens = sum(output.metrics.num_generation_tokens for output in outputs)
    parts = [f"{num_tokens} token{'s' * (num_tokens != 1)} in {seconds:.1f} s"]
    speed, first = _speed(outputs, num_tokens, seconds), _first_token(outputs)
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    if first is not None:
        parts.append(f"first {first:.2f} s")
    num_cached = sum(output.num_cached_tokens for output in outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    parts.append(f"cached {num_cached}/{num_prompt} prompt tokens")
    line = ", ".join(parts)
    if any(choice.finish_reason == "length" for output in outputs for choice in output.outputs):
        line += "\ncut at the length limit (--max-tokens)"
    return line


def _speed(outputs: Sequence[RequestOutput], num_tokens: int, seconds: float) -> float | None:
    """Of one answer, after its first token; of several, over the whole time."""
    if len(outputs) == 1:
        return outputs[0].metrics.tokens_per_s
    return num_tokens / seconds if seconds > 0 else None


def _first_token(outputs: Sequence[RequestOutput]) -> float | None:
    times = [o.metrics.ttft_s for o in outputs if o.metrics.ttft_s is not None]
    return min(times, default=None)


async def stream(
    engine: AsyncEngine, prompt: Prompt, params: SamplingParams, write: Callable[[str], None]
) -> RequestOutput:
    """Generate one sequence and `write` its text as it comes. Cancelling it aborts the request."""
    num_written = 0
    async with aclosing(engine.generate(prompt, params)) as outputs:
        async for output in outputs:
            text = output.outputs[0].text
            if len(text) > num_written:
                write(text[num_written:])
                num_written = len(text)
    if output.error is not None:
        raise CommandFailed(output.error)
    return output
