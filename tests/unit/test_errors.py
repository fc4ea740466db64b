"""The tree of errors: one root, the builtins that a caller expects, and messages without quotes."""

import inspect

import pytest

from elbowroom import errors

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if cls.__module__ == errors.__name__
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_hangs_below_the_root_and_is_in_the_drawing(cls):
    assert issubclass(cls, errors.ElbowroomError)
    assert cls.__name__ in (errors.__doc__ or "")
    assert cls.__doc__


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.BudgetTooSmall, ValueError),
        (errors.OutOfMemory, MemoryError),
        (errors.UnknownCodec, KeyError),
        (errors.UnknownField, TypeError),
        (errors.UnknownField, ValueError),
        (errors.UnsupportedTensor, TypeError),
        (errors.RestoreError, RuntimeError),
        (errors.ModuleError, RuntimeError),
        (errors.DataError, OSError),
    ],
)
def test_callers_may_catch_the_builtin_they_expect(cls, builtin):
    assert issubclass(cls, builtin)


def test_a_budget_error_carries_the_least_that_works():
    error = errors.BudgetTooSmall("too small", least_nbytes=17)
    assert (str(error), error.least_nbytes) == ("too small", 17)


def test_an_unknown_codec_is_said_without_quotes_around():
    assert str(errors.UnknownCodec("no codec 'x'")) == "no codec 'x'"
