"""Parameters: what is taken, what it becomes, and the text of every refusal."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest

from fastserve.errors import FastserveError
from fastserve.sampling_params import PARAMETER_NAMES, ParameterError, SamplingParams

REFUSALS = {
    "n": (0, "n=0: want at least 1"),
    "temperature": (math.nan, "temperature=nan: want a finite number, 0 or more"),
    "top_p": (0.0, "top_p=0.0: want a share in (0, 1]"),
    "top_k": (-2, "top_k=-2: want at least -1 (0 or -1 keeps every token)"),
    "min_p": (1.5, "min_p=1.5: want a share in [0, 1]"),
    "presence_penalty": (2.5, "presence_penalty=2.5: want -2 to 2"),
    "frequency_penalty": ("x", "frequency_penalty='x': want a number, -2 to 2"),
    "repetition_penalty": (0, "repetition_penalty=0: want 0.01 to 100 (1 is off)"),
    "logit_bias": ({5: 101}, "logit_bias[5]=101: want -100 to 100"),
    "seed": (2**64, "seed=18446744073709551616: want -9223372036854775808 to 18446744073709551615"),
    "stop": ([""], "stop=['']: want no empty string: it would end every output at once"),
    "stop_token_ids": ([-1], "stop_token_ids=[-1]: want a list of token ids, each 0 or more"),
    "min_tokens": (17, "min_tokens=17: want at most max_tokens=16"),
    "max_tokens": (0, "max_tokens=0: want at least 1, or None for up to the model's length"),
    "logprobs": (21, "logprobs=21: want 0 to 20"),
    "prompt_logprobs": (-1, "prompt_logprobs=-1: want 0 to 20"),
    "allowed_token_ids": ([], "allowed_token_ids=(): want at least one token, or None for all"),
    "ignore_eos": (1, "ignore_eos=1: want True or False"),
    "include_stop_str_in_output": (None, "include_stop_str_in_output=None: want True or False"),
    "skip_special_tokens": ("no", "skip_special_tokens='no': want True or False"),
    "spaces_between_special_tokens": (0, "spaces_between_special_tokens=0: want True or False"),
}


def test_every_parameter_has_a_refusal() -> None:
    assert set(REFUSALS) == set(PARAMETER_NAMES)


@pytest.mark.parametrize("name", REFUSALS)
def test_a_bad_value_is_refused_with_value_and_limit(name: str) -> None:
    value, message = REFUSALS[name]
    with pytest.raises(ParameterError) as refusal:
        SamplingParams(**{name: value})
    assert message in str(refusal.value)
    assert len(refusal.value.problems) == 1


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"max_tokens": -5},
            "max_tokens=-5: want at least 1, or None for up to the model's length",
        ),
        ({"max_tokens": True}, "max_tokens=True: want an integer, at least 1"),
        ({"max_tokens": 1.5}, "max_tokens=1.5: want an integer, at least 1"),
        ({"stop": ["x"] * 65}, "stop=65 strings: want at most 64; leave some out"),
        ({"stop": 7}, "stop=7: want a string or a list of strings"),
        ({"stop": [7]}, "stop=[7]: want a string or a list of strings"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids=65 tokens: want at most 64"),
        ({"stop_token_ids": 5}, "stop_token_ids=5: want a list of token ids"),
        ({"temperature": math.inf}, "temperature=inf: want a finite number, 0 or more"),
        ({"temperature": -0.1}, "temperature=-0.1: want 0 or more"),
        ({"logit_bias": {"a": 1}}, "logit_bias['a']=1: want a token id, 0 or more, as the key"),
        ({"logit_bias": {1: math.nan}}, "logit_bias[1]=nan: want -100 to 100"),
        ({"logit_bias": [1]}, "logit_bias=[1]: want a mapping from token ids to numbers"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias=1025 tokens: want at most"),
        ({"allowed_token_ids": range(1025)}, "allowed_token_ids=1025 tokens: want at most 1024"),
        ({"stop": ["a", "\ud800"]}, "want text without halves of surrogate pairs"),
        ({"logit_bias": {1: True}}, "logit_bias[1]=True: want -100 to 100"),
        ({"temperature": 1e39}, "temperature=1e+39: want 0 or more, at most 3.4e+38"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty=1e-38: want 0.01 to 100 (1 is off)"),
        ({"repetition_penalty": 1e39}, "repetition_penalty=1e+39: want 0.01 to 100 (1 is off)"),
    ],
)
def test_more_refusals(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError) as refusal:
        SamplingParams(**keywords)
    assert message in str(refusal.value)


NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")


HUGE = {"400": 10**400, "-400": -(10**400), "5000": 10**5000, "fraction": Fraction(10**400)}


@pytest.mark.parametrize("huge", [*HUGE, "1e39"])
@pytest.mark.parametrize("name", [*NUMBERS, "repetition_penalty", "logit_bias"])
def test_numbers_too_large_are_refused(name: str, huge: str) -> None:
    value = HUGE.get(huge, 1e39)
    with pytest.raises(ParameterError, match=name) as refusal:
        SamplingParams(**{name: {1: value} if name == "logit_bias" else value})
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("name", ["n", "top_k", "seed", "max_tokens", "stop_token_ids"])
def test_integers_that_python_does_not_write_are_refused(name: str) -> None:
    with pytest.raises(ParameterError, match=name):
        SamplingParams(**{name: [10**5000] if name == "stop_token_ids" else 10**5000})


@pytest.mark.parametrize("place", range(5))
def test_a_key_that_is_no_token_id_is_shortened(place: int) -> None:
    key = ("9" * 5000, "9" * 11, 10**5000, "\ud800", "x" * 5000)[place]
    with pytest.raises(ParameterError, match="as the key") as refusal:
        SamplingParams(logit_bias={key: 1})
    assert len(str(refusal.value)) < 200


def test_float_parameters_stay_finite_as_float32() -> None:
    """The largest and smallest of each, as samplers hold them."""
    extremes = {
        "temperature": (1e-5, 3.4e38),
        "top_p": (1e-300, 1.0),
        "min_p": (1e-300, 1.0),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
        "repetition_penalty": (0.01, 100.0),
    }
    for name, values in extremes.items():
        for value in values:
            assert np.isfinite(np.float32(getattr(SamplingParams(**{name: value}), name)))


def test_all_bad_values_are_named_at_once() -> None:
    with pytest.raises(ParameterError) as refusal:
        SamplingParams(temperature=-1, top_p=2, max_tokens=0)
    assert str(refusal.value) == (
        "temperature=-1: want 0 or more; top_p=2: want a share in (0, 1]; "
        "max_tokens=0: want at least 1, or None for up to the model's length"
    )
    assert refusal.value.http_status == 400
    assert refusal.value.code == "invalid_parameter"
    assert isinstance(refusal.value, FastserveError)
    assert isinstance(refusal.value, ValueError)


def test_an_unknown_keyword_names_the_nearest() -> None:
    with pytest.raises(TypeError) as refusal:
        SamplingParams(temprature=0.5)
    expected = "SamplingParams has no keyword 'temprature'; did you mean 'temperature'?"
    assert str(refusal.value) == expected
    with pytest.raises(TypeError, match="has no keyword 'beam_width'; known: allowed_token_ids, "):
        SamplingParams(beam_width=4)


def test_limits_themselves_are_taken() -> None:
    params = SamplingParams(
        n=1,
        temperature=0,
        top_p=1,
        top_k=-1,
        min_p=1.0,
        stop=["x"] * 64,
        stop_token_ids=range(64),
        max_tokens=1,
        min_tokens=1,
        logprobs=20,
        prompt_logprobs=0,
        seed=-1,
    )
    assert params.greedy
    assert len(params.stop_strings) == 64
    assert params.stop_token_ids == tuple(range(64))


def test_values_are_normalised() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        stop="end",
        stop_token_ids=None,
        logit_bias={"7": 1, 8: -2.5},
    )
    assert type(params.temperature) is float
    assert type(params.top_k) is int
    assert params.stop == ("end",)
    assert params.stop_token_ids == ()
    assert params.logit_bias == {7: 1.0, 8: -2.5}
    assert SamplingParams(stop=None).stop_strings == ()
    assert SamplingParams(stop_token_ids=np.array([5, 6])).stop_token_ids == (5, 6)
    assert not params.greedy
    assert SamplingParams(temperature=9e-6).greedy


def test_it_is_frozen_and_can_be_varied() -> None:
    params = SamplingParams(stop=["a"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
    assert dataclasses.replace(params, n=3).n == 3
    with pytest.raises(ParameterError):
        dataclasses.replace(params, n=0)
