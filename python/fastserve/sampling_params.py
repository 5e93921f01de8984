"""What a client may ask of one request, checked when it is made.

The names and the defaults are vLLM's. A bad value is refused here, before anything is queued, and
every bad value of a request is named at once, with the limit and what to do.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, SupportsIndex

from fastserve.errors import FastserveError
from fastserve.keywords import names_unknown_keywords
from fastserve.surrogates import half_pair

__all__ = ["ParameterError", "SamplingParams"]

MAX_NUM_STOP_STRINGS = 64
MAX_NUM_STOP_TOKENS = 64
MAX_NUM_LOGPROBS = 20
MAX_NUM_BIASED_TOKENS = 1024
MAX_NUM_ALLOWED_TOKENS = 1024
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy (vLLM's threshold)."""

_MAX_COUNT = 2**31 - 1
_MAX_FLOAT32 = 3.4028234663852886e38
_MAX_KEY_LENGTH = 10  # Digits of the largest token id. Python refuses to read more than 4300.


class ParameterError(FastserveError, ValueError):
    """One or more parameters of a request are out of range.

    Attributes:
        problems: One sentence for each bad parameter: ``name=value: want …``.
        code: Stable machine-readable name of the kind of error.
        http_status: What a server should answer with.
    """

    code = "invalid_parameter"
    http_status = 400

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


@names_unknown_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt.

    Attributes:
        n: Sequences to generate. They share the prompt's blocks and differ by their noise.
        temperature: Divides the logits; 0 (or less than 1e-5) takes the best token.
        top_p: Keep the most likely tokens that together hold this share, in (0, 1].
        top_k: Keep this many most likely tokens; 0 or -1 keeps all.
        min_p: Drop tokens less likely than this share of the best one, in [0, 1].
        presence_penalty: Subtracted from the logit of every token generated so far, in [-2, 2].
        frequency_penalty: The same, times how often it was generated, in [-2, 2].
        repetition_penalty: Divides positive and multiplies negative logits of every token of the
            prompt and of the output, in [0.01, 100]; 1 is off.
        logit_bias: Added to the logits of these tokens, each in [-100, 100].
        seed: Of the noise. The same request with the same seed gives the same tokens in any
            company. ``None`` derives one from the engine's seed and the request's number.
        stop: Text, or up to 64 texts, that end a sequence. The output ends before it.
        stop_token_ids: Tokens that end a sequence. They are part of its token ids, not of its text.
        include_stop_str_in_output: Keep the stop text (or the stop token's text) in the output.
        ignore_eos: Go on after the model's own end-of-sequence token.
        min_tokens: No end-of-sequence or stop token is taken before this many tokens.
        max_tokens: Most tokens to generate, at least 1. ``None`` goes on to the model's length.
        logprobs: Report the log probability of each generated token and of this many best ones, 0
            to 20. They are the model's own, before penalties and temperature.
        prompt_logprobs: The same for the tokens of the prompt.
        allowed_token_ids: Take no token but these.
        skip_special_tokens: Leave special tokens out of the text.
        spaces_between_special_tokens: Put spaces between special tokens that stay in the text.

    Raises:
        ParameterError: Names *every* bad parameter, not only the first.
        TypeError: A keyword that is not known, with the nearest that is.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        check = _Checker(self)
        check.count("n", at_least=1)
        check.number("temperature", "0 or more", lambda x: x >= 0.0)
        check.number("top_p", "a share in (0, 1]", lambda x: 0.0 < x <= 1.0)
        check.count("top_k", at_least=-1, remedy=" (0 or -1 keeps every token)")
        check.number("min_p", "a share in [0, 1]", lambda x: 0.0 <= x <= 1.0)
        check.number("presence_penalty", "-2 to 2", lambda x: -2.0 <= x <= 2.0)
        check.number("frequency_penalty", "-2 to 2", lambda x: -2.0 <= x <= 2.0)
        check.number("repetition_penalty", "0.01 to 100 (1 is off)", lambda x: 0.01 <= x <= 100.0)
        check.logit_bias()
        check.integer("seed", -(2**63), 2**64 - 1, optional=True)
        check.stop_strings()
        check.token_ids("stop_token_ids", MAX_NUM_STOP_TOKENS)
        check.count("min_tokens", at_least=0)
        check.count(
            "max_tokens", at_least=1, optional=True, remedy=", or None for up to the model's length"
        )
        check.integer("logprobs", 0, MAX_NUM_LOGPROBS, optional=True)
        check.integer("prompt_logprobs", 0, MAX_NUM_LOGPROBS, optional=True)
        if self.allowed_token_ids is not None:
            check.token_ids("allowed_token_ids", MAX_NUM_ALLOWED_TOKENS)
            check.not_empty("allowed_token_ids", "at least one token, or None for all of them")
        for name in _FLAGS:
            check.flag(name)
        check.min_not_above_max()
        if check.problems:
            raise ParameterError(check.problems)

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken, without noise."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as it was normalised: a tuple, empty where there is none."""
        assert isinstance(self.stop, tuple)
        return self.stop


_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


class _Checker:
    """Reads one parameter after another, stores what it means, and collects what is wrong."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.problems: list[str] = []

    def given(self, name: str) -> Any:
        return getattr(self.params, name)

    def refuse(self, name: str, value: object, want: str) -> None:
        self.problems.append(f"{name}={_shown(value)}: want {want}")

    def store(self, name: str, value: object) -> None:
        object.__setattr__(self.params, name, value)

    def count(self, name: str, *, at_least: int, optional: bool = False, remedy: str = "") -> None:
        self.integer(name, at_least, _MAX_COUNT, f"at least {at_least}{remedy}", optional=optional)

    def integer(
        self, name: str, low: int, high: int, want: str | None = None, *, optional: bool = False
    ) -> None:
        value = self.given(name)
        if value is None and optional:
            return
        number = _as_int(value)
        if number is None or not low <= number <= high:
            if want is None or (number is not None and number > high):
                want = f"{low} to {high}"
            kind = "an integer, " if number is None else ""
            self.refuse(name, value, kind + want)
        else:
            self.store(name, number)

    def number(self, name: str, want: str, ok: Callable[[float], bool]) -> None:
        value = self.given(name)
        number = _as_float(value)
        if number is None:
            self.refuse(name, value, f"a number, {want}")
        elif not math.isfinite(number):
            self.refuse(name, value, f"a finite number, {want}")
        elif not ok(number):
            self.refuse(name, value, want)
        elif number > _MAX_FLOAT32:  # Samplers hold float32.
            self.refuse(name, value, f"{want}, at most {_MAX_FLOAT32:.1e}")
        else:
            self.store(name, number)

    def flag(self, name: str) -> None:
        value = self.given(name)
        if not isinstance(value, bool):
            self.refuse(name, value, "True or False")

    def not_empty(self, name: str, want: str) -> None:
        if self.given(name) == ():
            self.refuse(name, (), want)

    def stop_strings(self) -> None:
        value = self.given("stop")
        given = [value] if isinstance(value, str) else value or ()
        if not isinstance(given, Iterable) or isinstance(given, Mapping | bytes):
            self.refuse("stop", value, "a string or a list of strings")
            return
        strings = tuple(given)
        if any(not isinstance(string, str) for string in strings):
            self.refuse("stop", value, "a string or a list of strings")
        elif any(half_pair(string) for string in strings):
            self.refuse("stop", value, "text without halves of surrogate pairs")
        elif "" in strings:
            self.refuse("stop", value, "no empty string: it would end every output at once")
        elif len(strings) > MAX_NUM_STOP_STRINGS:
            self.refuse(
                "stop", f"{len(strings)} strings", f"at most {MAX_NUM_STOP_STRINGS}; leave some out"
            )
        self.store("stop", strings)

    def token_ids(self, name: str, limit: int) -> None:
        value = self.given(name)
        value = () if value is None else value
        if not isinstance(value, Iterable) or isinstance(value, Mapping | str | bytes):
            self.refuse(name, value, "a list of token ids")
            return
        ids = tuple(_as_int(token) for token in value)
        if any(token is None or not 0 <= token <= _MAX_COUNT for token in ids):
            self.refuse(name, value, "a list of token ids, each 0 or more")
        elif len(ids) > limit:
            self.refuse(name, f"{len(ids)} tokens", f"at most {limit}; leave some out")
        self.store(name, ids)

    def logit_bias(self) -> None:
        value = self.given("logit_bias")
        if value is None:
            return
        if not isinstance(value, Mapping):
            self.refuse("logit_bias", value, "a mapping from token ids to numbers")
            return
        if len(value) > MAX_NUM_BIASED_TOKENS:
            want = f"at most {MAX_NUM_BIASED_TOKENS}; leave some out"
            self.refuse("logit_bias", f"{len(value)} tokens", want)
            return
        bias: dict[int, float] = {}
        for key, amount in value.items():
            token, number = _token_of_key(key), _as_float(amount)
            if token is None or not 0 <= token <= _MAX_COUNT:
                name = f"logit_bias[{_shown(key)}]"
                self.refuse(name, amount, "a token id, 0 or more, as the key")
            elif number is None or not -100.0 <= number <= 100.0:
                self.refuse(f"logit_bias[{key}]", amount, "-100 to 100")
            else:
                bias[token] = number
        self.store("logit_bias", bias)

    def min_not_above_max(self) -> None:
        low, high = _as_int(self.params.min_tokens), _as_int(self.params.max_tokens)
        if low is not None and high is not None and low > high >= 1:
            self.refuse("min_tokens", low, f"at most max_tokens={high}")


def _as_int(value: object) -> int | None:
    """`value` if it is an integer of any kind (numpy's too), but not a bool."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    return operator.index(value)


def _as_float(value: object) -> float | None:
    """`value` if it is a number of any kind, but not a bool; infinite beyond a float's range."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _token_of_key(key: object) -> int | None:
    """The token id of a mapping's key. JSON has no integer keys: OpenAI's clients send "50256"."""
    if isinstance(key, str):
        return int(key) if key.isdecimal() and len(key) <= _MAX_KEY_LENGTH else None
    return _as_int(key)


def _shown(value: Any) -> str:
    """A value as an error names it: short, whatever was given."""
    try:
        text = value if isinstance(value, str) and " " in value else repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits.
        text = f"{type(value).__name__} of more than 4300 digits"
    return text if len(text) <= 80 else text[:77] + "..."


PARAMETER_NAMES = tuple(field.name for field in fields(SamplingParams))
"""Every keyword that :class:`SamplingParams` takes."""
