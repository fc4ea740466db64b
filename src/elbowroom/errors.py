"""Every error that a user of elbowroom can cause, in one tree.

    ElbowroomError
    |-- PlanError                  a plan cannot be made or followed
    |   |-- BudgetTooSmall         ... because the bytes do not suffice      (also a ValueError)
    |   `-- OutOfMemory            ... because the device has less           (also a MemoryError)
    |-- CodecError                 a codec cannot do what was asked
    |   |-- UnknownCodec           no such id                                (also a KeyError)
    |   |-- UnknownField           no such setting, or a value out of range  (also a TypeError and
    |   |                                                                     a ValueError)
    |   `-- UnsupportedTensor      this dtype, layout or content             (also a TypeError)
    |-- ModuleError                a module of er.nn cannot do this          (also a RuntimeError)
    |-- OptimizerError             an optimizer cannot do what was asked
    |   |-- InvalidSetting         ... with this setting                     (also a ValueError)
    |   |-- UnsupportedParameter   ... for this parameter                    (also a TypeError)
    |   |-- UnsupportedGradient    ... with this gradient                    (also a RuntimeError)
    |   `-- StateMismatch          ... with this state_dict                  (also a ValueError)
    |-- RestoreError               a saved tensor cannot be given back       (also a RuntimeError)
    |   `-- NothingHeld            ... because its forward was run to be counted, or tried, only
    `-- DataError                  a file is missing or is not what it says  (also an OSError)

A message says what was asked, what was found, and what to type next. Broken invariants, which only
our own code can cause, are asserts and are not listed here.
"""

from collections.abc import Mapping


class ElbowroomError(Exception):
    """The root: catch this to catch everything that elbowroom raises on purpose."""


class PlanError(ElbowroomError):
    """A plan cannot be made or followed."""


class BudgetTooSmall(PlanError, ValueError):
    """No allowed set of actions fits the budget.

    least_nbytes  the smallest budget that is possible, in bytes
    parts         what takes the memory at the peak, in bytes by name; empty if that is not known
    """

    def __init__(
        self, message: str, *, least_nbytes: int, parts: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(message)
        self.least_nbytes = least_nbytes
        self.parts = dict(parts or {})


class OutOfMemory(PlanError, MemoryError):
    """A step ran out of memory, and no plan for less memory has helped."""


class CodecError(ElbowroomError):
    """A codec cannot do what was asked."""


class UnknownCodec(CodecError, KeyError):
    """No codec is registered under this id."""

    def __str__(self) -> str:  # KeyError would show the message in quotes
        return str(self.args[0])


class UnknownField(CodecError, TypeError, ValueError):
    """A codec has no such field, or the field does not accept this value."""


class UnsupportedTensor(CodecError, TypeError):
    """A codec does not accept tensors of this dtype, layout or content."""


class ModuleError(ElbowroomError, RuntimeError):
    """A module of `elbowroom.nn`, or a conversion to one, cannot do what was asked."""


class OptimizerError(ElbowroomError):
    """An optimizer cannot do what was asked."""


class InvalidSetting(OptimizerError, ValueError):
    """An optimizer has no such setting, or it is out of range."""


class UnsupportedParameter(OptimizerError, TypeError):
    """An optimizer does not accept parameters of this dtype or layout."""


class UnsupportedGradient(OptimizerError, RuntimeError):
    """An optimizer does not accept gradients of this layout."""


class StateMismatch(OptimizerError, ValueError):
    """A state_dict does not match the optimizer, or is of a newer version."""


class RestoreError(ElbowroomError, RuntimeError):
    """A saved tensor cannot be restored for backward."""


class NothingHeld(RestoreError):
    """Backward runs on the graph of a forward that only counted or tried, and stored nothing.

    `er.fit` handles such errors inside of this forward. If one reaches a script, the script has
    kept a tensor of that forward.
    """


class DataError(ElbowroomError, OSError):
    """A data file is missing, truncated, or not in the expected format."""
