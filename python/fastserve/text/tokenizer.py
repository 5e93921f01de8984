"""Text to tokens, and the table that turns tokens back to text.

The work is done by the ``tokenizers`` library, from a folder's ``tokenizer.json`` or rebuilt from
GGUF metadata. This page adds what an engine needs besides: the exact bytes of every token (a token
is often part of a character, so streamed text is put together from bytes), which tokens are
special, and the chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tokenizers import Tokenizer as Backend

from fastserve.errors import ModelError
from fastserve.models.gguf_file import GgufFile
from fastserve.models.hf_config import read_json
from fastserve.models.resolve import ModelSource
from fastserve.sampling_params import ParameterError
from fastserve.surrogates import half_pair
from fastserve.text.chat_template import ChatTemplate, templates_in
from fastserve.text.gguf_vocab import named_token, tokenizer_from_gguf

if TYPE_CHECKING:
    from fastserve.text.detokenizer import TokenTable

_LONG_TEXT: Final = 2000
"""Characters that take about a millisecond to encode."""

_SPACE: Final = "\u2581"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token")
_GGUF_NAMES: Final = ("bos", "eos", "unknown", "seperator", "padding")  # So it is spelled there.


class Tokenizer:
    """One model's tokenizer. Immutable; any thread may use it.

    Attributes:
        vocab_size: Ids are below it. The model may have more rows, which no text gives.
        special_ids: Tokens that mark structure and are left out of answers.
        bos_token_id: Token that begins a text, if the model has one.
        eos_token_id: Token that ends a text, if the model has one.
        strips_leading_space: A text's first token carries a space that is not part of the text. It
            is to be dropped where a text starts, not where one is continued.
        chat_templates: By name; ``default`` is the usual one.
    """

    def __init__(
        self,
        backend: Backend,
        origin: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._origin = origin
        self._special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, ChatTemplate] = {}
        self._token_bytes: list[bytes] | None = None
        self._table: TokenTable | None = None
        self.chat_templates = dict(chat_templates or {})
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.vocab_size = max(backend.get_vocab_size(), max(added, default=-1) + 1)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self._byte_level, self.strips_leading_space = _decoding(backend, origin)

    @classmethod
    def from_source(cls, source: ModelSource) -> Tokenizer:
        """The tokenizer of a model.

        Raises:
            ModelError: The model has none, or it is broken or of an unsupported kind.
        """
        return _from_folder(source.path) if source.gguf is None else _from_gguf(source.gguf)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of ``text``, with what the model wants around it unless told otherwise.

        Raises:
            ParameterError: It has half of a surrogate pair, which is in no encoding.
        """
        try:
            if len(text) > _LONG_TEXT:
                # A batch is encoded without the GIL, a text is not.
                batch = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
                return list(batch[0].ids)
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            if (half := half_pair(text)) is None:
                raise
            problem = f"prompt has {half[0]!a} at character {half.start()}"
            raise ParameterError([f"{problem}: want both halves of a surrogate pair"]) from None
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``. What is no UTF-8 becomes U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for; nothing for an id that is only padding of the model's rows."""
        table = self.token_bytes_table()
        return table[token] if 0 <= token < len(table) else b""

    def token_bytes_table(self) -> list[bytes]:
        """The bytes of every token id."""
        if self._token_bytes is None:
            to_bytes = _byte_level_bytes if self._byte_level else _fallback_bytes
            table = [b""] * self.vocab_size
            for token, index in self._backend.get_vocab(with_added_tokens=True).items():
                table[index] = to_bytes(token)
            self._token_bytes = table
        return self._token_bytes

    @property
    def table(self) -> TokenTable:
        """The same for detokenizers, made once."""
        if self._table is None:
            from fastserve.text.detokenizer import TokenTable

            self._table = TokenTable(self.token_bytes_table(), sorted(self.special_ids))
        return self._table

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how messages become a prompt."""
        return bool(self.chat_templates)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt for ``messages`` as text. Options are those of :meth:`ChatTemplate.render`.

        Raises:
            ModelError: The model has no chat template.
            ChatTemplateError: The template refuses the messages.
        """
        name = "tool_use" if options.get("tools") and "tool_use" in self.chat_templates else ""
        return self._chat_template(name or "default").render(messages, **options)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[int]:
        """The prompt for ``messages`` as tokens. The template has the special tokens in it."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def _chat_template(self, name: str) -> ChatTemplate:
        compiled = self._compiled.get(name)
        if compiled is None:
            source = self.chat_templates.get(name)
            if source is None:
                raise ModelError(
                    f"{self._origin}: the model has no chat template, so it takes prompts and not "
                    "messages; use generate, or /v1/completions, or an instruction-tuned model"
                )
            compiled = ChatTemplate(source, self._special_tokens, self._origin)
            self._compiled[name] = compiled
        return compiled

    def _id_of(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(
            f"{folder}: no tokenizer.json; make one with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # The library raises plain Exception.
        raise ModelError(f"{path}: cannot be used: {error}") from None
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.exists() else {}
    templates = dict(templates_in(settings.get("chat_template")))
    single = folder / "chat_template.jinja"
    if single.exists():
        templates = {"default": single.read_text(encoding="utf-8")}
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = extra.read_text(encoding="utf-8")
    return Tokenizer(
        backend,
        str(folder),
        special_tokens=_special_tokens(settings),
        chat_templates=templates,
    )


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Names to tokens. A token is text, or an object with its text in ``content``."""
    named: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        token = settings.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            named[name] = token
    return named


def _from_gguf(file: GgufFile) -> Tokenizer:
    special: dict[str, str] = {}
    for name, key in zip(_SPECIAL_NAMES, _GGUF_NAMES, strict=True):
        token = named_token(file, key)
        if token is not None:
            special[name] = token[0]
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix).removeprefix(".") or "default": text
        for key, text in file.metadata.items()
        if (key == prefix or key.startswith(prefix + ".")) and isinstance(text, str)
    }
    return Tokenizer(
        tokenizer_from_gguf(file),
        str(file.path),
        special_tokens=special,
        chat_templates=templates,
    )


def _decoding(backend: Backend, origin: str) -> tuple[bool, bool]:
    """Whether tokens are written byte by byte, and whether decoding drops a leading space."""
    state = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = []
    if state is not None:
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"] for step in steps}
    unknown = kinds - {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if unknown or not kinds:
        raise ModelError(
            f"{origin}: a tokenizer with the decoder {', '.join(sorted(unknown)) or 'none'} is not "
            "supported; byte-level and SentencePiece ones are"
        )
    strips = any(
        (step["type"] == "Strip" and step["start"] > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in steps
    )
    return "ByteLevel" in kinds, strips


def _printable_bytes() -> dict[int, str]:
    """GPT-2's alphabet: the character that stands for a byte → the byte, as Latin-1."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(plain)]
    table = {byte: chr(byte) for byte in plain}
    table |= {0x100 + index: chr(byte) for index, byte in enumerate(others)}
    return table


_ALPHABET: Final = _printable_bytes()
_FOREIGN: Final = re.compile(f"[^{re.escape(''.join(map(chr, _ALPHABET)))}]")


def _byte_level_bytes(token: str) -> bytes:
    # An added token may have characters outside the alphabet; then it is its own text.
    if _FOREIGN.search(token):
        return token.encode()
    return token.translate(_ALPHABET).encode("latin-1")


def _fallback_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()
