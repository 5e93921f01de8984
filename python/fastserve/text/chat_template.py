"""Messages to one prompt, by the template that a model brings along.

Templates are programs of strangers, so they run in jinja2's immutable sandbox and see plain JSON
values only. What they may use beyond jinja2's own is what transformers gives them: ``tojson`` that
does not escape HTML, ``raise_exception``, ``strftime_now``, loop controls, and ``{% generation %}``
blocks, which matter for training and are passed through. Tests compare the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NoReturn

from fastserve.errors import FastserveError, ModelError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

_MARK: Final = "FASTSERVE_END_OF_FINAL_MESSAGE "


class ChatTemplateError(FastserveError, ValueError):
    """Messages that the model's chat template does not take."""


def as_conversation(messages: object, where: str = "messages") -> list[dict[str, Any]]:
    """Messages as templates take them: with a role that they know, and text for OpenAI's parts.

    ``developer`` is OpenAI's newer word for ``system``. An assistant that only called tools has
    said ``None``, which is no text.

    Raises:
        TypeError: It is no list.
        ChatTemplateError: A message lacks its role or content, or has other parts than text.
    """
    want = '[{"role": "user", "content": "..."}]'
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise TypeError(f"{where} is a {type(messages).__name__}; want a list: {want}")
    chat = []
    for index, message in enumerate(messages):
        place = f"{where}[{index}]"
        if not isinstance(message, Mapping):
            raise TypeError(f"{place} is a {type(message).__name__}; want {want[1:-1]}")
        if not isinstance(message.get("role"), str):
            raise ChatTemplateError(f"{place} has no role; want {want[1:-1]}")
        content = message.get("content")
        role = "system" if message["role"] == "developer" else message["role"]
        if content is None and role != "assistant":
            raise ChatTemplateError(f"{place} has no content; want {want[1:-1]}")
        if isinstance(content, list | tuple):
            content = _joined(content, f"{place}.content")
        chat.append({**message, "role": role, "content": "" if content is None else content})
    return chat


def template_options(
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The front ends' arguments as keywords of :meth:`ChatTemplate.render`."""
    return {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        **({} if tools is None else {"tools": tools}),
        **(chat_template_kwargs or {}),
    }


def _joined(parts: Sequence[Any], where: str) -> str:
    """The text of OpenAI's content parts."""
    texts = []
    for index, part in enumerate(parts):
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            got = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatTemplateError(
                f'{where}[{index}] is {got!r}; want {{"type": "text", "text": "..."}}: '
                "nothing else is supported"
            )
        texts.append(part["text"])
    return "".join(texts)


class ChatTemplate:
    """A compiled template.

    Args:
        source: Its text.
        special_tokens: Names that the template may use: ``bos_token``, ``eos_token``, ...
        origin: Where it is from, for messages.

    Raises:
        ModelError: It is no valid template.
    """

    __slots__ = ("_template", "origin", "source", "special_tokens")

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.origin = origin
        self._template = _compile(source, origin)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for ``messages``.

        Args:
            messages: Each with ``role`` and ``content``, and what else the template knows.
            add_generation_prompt: End with what begins an answer.
            continue_final_message: End inside the last message, so that the model goes on with it.
            tools: Functions that the model may call, as JSON schemas.
            documents: Texts that the model may quote.
            variables: What else this template takes (``enable_thinking=False``).

        Raises:
            ChatTemplateError: The messages are not to the template's liking; says why.
        """
        if add_generation_prompt and continue_final_message:
            raise ChatTemplateError(
                "add_generation_prompt=True and continue_final_message=True: want at most one"
            )
        chat = [_message(message, index) for index, message in enumerate(messages)]
        if continue_final_message:
            _mark_end(chat)
        values = self.special_tokens | {
            name: _plain(value, name) for name, value in variables.items()
        }
        prompt = self._run(
            values
            | {
                "messages": chat,
                "tools": None if tools is None else _plain(list(tools), "tools"),
                "documents": None if documents is None else _plain(list(documents), "documents"),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at_mark(prompt) if continue_final_message else prompt

    def _run(self, values: dict[str, Any]) -> str:
        import jinja2

        try:
            return self._template.render(values)
        except jinja2.TemplateError as error:
            reason = error.message or type(error).__name__
        except (TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
        raise ChatTemplateError(f"the model's chat template refuses these messages: {reason}")


def _message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message as templates expect it: keys without a value are left out."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ChatTemplateError(
            f"{where} is a {type(message).__name__}; want an object with role and content"
        )
    return {
        str(key): _plain(value, f"{where}.{key}")
        for key, value in message.items()
        if value is not None
    }


def _plain(value: Any, where: str) -> Any:
    """A copy made of JSON's own types, so that a template gets hold of nothing else."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ChatTemplateError(f"{where} is a {type(value).__name__}; want JSON values")


def _mark_end(chat: list[dict[str, Any]]) -> None:
    """Mark where the last message's text ends."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _MARK
        return
    parts = content if isinstance(content, list) else []
    for part in reversed(parts):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _MARK
            return
    raise ChatTemplateError("continue_final_message=True: the last message has no text to go on")


def _cut_at_mark(prompt: str) -> str:
    at = prompt.rfind(_MARK.strip())
    if at < 0:
        raise ChatTemplateError(
            "continue_final_message=True: the model's chat template leaves the last message out"
        )
    # A template that trims its messages has taken the mark's own space, and the text's too.
    kept = prompt[at:].startswith(_MARK)
    return prompt[:at] if kept else prompt[:at].rstrip()


def _compile(source: str, origin: str) -> Template:
    import jinja2

    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"{origin}: line {error.lineno} of the chat template: {error}") from None


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """The sandbox. jinja2 is imported here: a prompt that is plain text does without it."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}…{% endgeneration %}`` is its content."""

        tags = {"generation"}  # noqa: RUF012 — jinja2 reads it from the class

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def templates_in(value: object) -> Iterator[tuple[str, str]]:
    """Name and text of each template in ``tokenizer_config.json``'s ``chat_template``."""
    if isinstance(value, str):
        yield "default", value
    for entry in value if isinstance(value, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("template"), str):
            yield str(entry.get("name", "default")), entry["template"]
