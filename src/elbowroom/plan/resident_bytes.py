"""The bytes that a model and its optimizers hold between steps.

Shown as "states int8: 2.05 bytes a parameter (fp32 8.00), weights 4.00, gradients 4.00".
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ResidentBytes:
    """Bytes, and by how many parameters they are shared.

    weights     elements of all parameters
    trained     of those that get a gradient
    updated     of those whose states an optimizer holds, or will
    *_nbytes    of weights, of the gradients that are there at one time, and of states
    fp32_nbytes what the states would take in float32
    states      how they are held: "int8", "fp32", "fp32 + int8" for some so and some so; "": none
    """

    weights: int
    weights_nbytes: int
    trained: int
    gradients_nbytes: int
    updated: int = 0
    states_nbytes: int = 0
    fp32_nbytes: int = 0
    states: str = ""

    def __str__(self) -> str:
        weights = _per_element(self.weights_nbytes, self.weights)
        gradients = _per_element(self.gradients_nbytes, self.trained)
        of = "" if self.trained == self.weights else f" of {self.trained} that are trained"
        rest = f"weights {weights}, gradients {gradients}{of}"
        if not self.states:
            return f"no optimizer states; bytes a parameter: {rest}"
        states = _per_element(self.states_nbytes, self.updated)
        fp32 = _per_element(self.fp32_nbytes, self.updated)
        return f"states {self.states}: {states} bytes a parameter (fp32 {fp32}), {rest}"


def resident_bytes_from(data: dict[str, Any] | None) -> ResidentBytes | None:
    """Reads it from JSON. Raises TypeError for what is no such object."""
    if data is None:
        return None
    resident = ResidentBytes(**data)
    numbers = [value for name, value in vars(resident).items() if name != "states"]
    if not all(isinstance(value, int) for value in numbers):
        raise TypeError("bytes and elements are whole numbers")
    return resident


def _per_element(nbytes: int, elements: int) -> str:
    return f"{nbytes / elements:.2f}" if elements else "0"
