"""A tokenizer from GGUF metadata.

GGUF keeps a vocabulary, merges or scores, and the *name* of a way to cut text into words before the
merges apply; llama.cpp and the Hugging Face tokenizers have the rest in code. Here the two kinds
that the supported models use are rebuilt for the ``tokenizers`` library:

- ``gpt2``: byte-level BPE. Each byte is written as a printable character; merges are given.
- ``llama``: SentencePiece's BPE. A space is written ``▁``; two neighbours merge into the token with
  the highest score, so the scores are the merges; characters without a token fall back to bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from fastserve.errors import ModelError
from fastserve.models.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
_SPACE: Final = "\u2581"

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """How text is cut into words.

    Attributes:
        patterns: Applied one after the other; what a pattern matches stands alone.
        ignore_merges: A word that is a token is that token, whatever the merges say.
        compose: Characters are composed (NFC) first.
        add_bos: Whether a text begins with the BOS token where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    compose: bool = False
    add_bos: bool = False


_WORDS: Final = (
    {
        "default": _Words(patterns=(_GPT2,)),
        "gpt-2": _Words(patterns=(_GPT2,)),
        "smollm": _Words(patterns=(r"\p{N}", _GPT2)),
        "tekken": _Words(patterns=(_TEKKEN,), ignore_merges=True, add_bos=True),
    }
    | {
        name: _Words(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True)
        for name in ("llama-bpe", "llama3", "llama-v3")
    }
    | {name: _Words(patterns=(_QWEN2,), compose=True) for name in ("qwen2", "deepseek-r1-qwen")}
)


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """Build the tokenizer that ``file`` describes.

    Raises:
        ModelError: Something is missing, or it is of a kind that is not supported.
    """
    kind = file.get("tokenizer.ggml.model", str)
    tokens: list[str] = file.get("tokenizer.ggml.tokens", list)
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer, add_bos = _sentence_piece(file, tokens)
    else:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.model={kind!r} is not supported; the supported ones are "
            "gpt2 and llama"
        )
    types = file.metadata.get("tokenizer.ggml.token_type")
    kinds = [1] * len(tokens) if types is None else types.tolist()
    pairs = list(zip(tokens, kinds, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in pairs if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in pairs if kind == _USER_DEFINED]
    )
    _add_ends(tokenizer, file, add_bos)
    return tokenizer


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = file.get("tokenizer.ggml.pre", str, "default")
    words = _WORDS.get(name)
    if words is None:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.pre={name!r} is not supported; the supported ones are "
            f"{', '.join(sorted(_WORDS))}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", list)]
    tokenizer = _pairs(file, tokens, merges, ignore_merges=words.ignore_merges)
    if words.compose:
        tokenizer.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Split(Regex(p), "isolated") for p in words.patterns]
    bytes_as_characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_as_characters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, words.add_bos


def _sentence_piece(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    given = file.get("tokenizer.ggml.merges", list, [])
    merges = [tuple(merge.split(" ", 1)) for merge in given] or _merges_of_scores(file, tokens)
    unknown = named_token(file, "unknown")
    options = {} if unknown is None else {"unk_token": unknown[0]}
    tokenizer = _pairs(file, tokens, merges, fuse_unk=True, byte_fallback=True, **options)
    escape = normalizers.Replace(" ", _SPACE)
    unescape: list[Any] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if file.get("tokenizer.ggml.add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), escape])
        unescape.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = escape
    tokenizer.decoder = decoders.Sequence(unescape)
    return tokenizer, True


def named_token(file: GgufFile, name: str) -> tuple[str, int] | None:
    """The token that the file calls ``bos``, ``eos``, ..., with its id."""
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    index: int = file.get(key, int)
    tokens: list[str] = file.get("tokenizer.ggml.tokens", list)
    if not 0 <= index < len(tokens):
        raise ModelError(f"{file.path}: {key}={index}: want less than the {len(tokens)} tokens")
    return tokens[index], index


def _pairs(file: GgufFile, tokens: list[str], merges: list[Any], **options: Any) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # The library raises plain Exception.
        raise ModelError(f"{file.path}: the tokenizer is corrupt: {error}") from None


def _merges_of_scores(file: GgufFile, tokens: list[str]) -> list[tuple[str, str]]:
    """Every way to make a token of two, the token with the highest score first."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError(f"{file.path}: metadata has no tokenizer.ggml.scores for its tokens")
    known = set(tokens)
    ranked = sorted(zip(scores.tolist(), tokens, strict=True), key=lambda pair: -pair[0])
    return [
        (token[:cut], token[cut:])
        for _, token in ranked
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


def _add_ends(tokenizer: Tokenizer, file: GgufFile, add_bos: bool) -> None:
    """Let encoding add the tokens that begin and end a text, where the model wants them."""
    ends: dict[str, tuple[str, int]] = {}
    for name, default in (("bos", add_bos), ("eos", False)):
        token = named_token(file, name)
        if token is not None and file.get(f"tokenizer.ggml.add_{name}_token", bool, default):
            ends[name] = token
    if not ends:
        return
    before = [ends["bos"][0]] if "bos" in ends else []
    after = [ends["eos"][0]] if "eos" in ends else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=list(ends.values()),
    )
