"""The front page: what `from fastserve import ...` gives."""

from __future__ import annotations

import fastserve
from fastserve import errors


def test_every_name_is_there_and_is_what_it_says() -> None:
    for name in fastserve.__all__:
        value = getattr(fastserve, name)
        assert name == "__version__" or value.__name__ == name


def test_errors_that_public_methods_raise_are_exported() -> None:
    wanted = {"ChatTemplateError", "EngineDeadError", "KernelError", "ParameterError"}
    wanted |= {"ConfigError", "FastserveError", "ModelError", "RequestError"}
    assert wanted <= set(fastserve.__all__)
    for name in wanted:
        assert issubclass(getattr(fastserve, name), errors.FastserveError)
