"""Figures of what was decided for a compiled region."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """Decision for one compiled region; all figures are estimates, in bytes.

    peak_nbytes         of forward and backward, gradients included, parameters and inputs not
    saved_nbytes        held between forward and backward
    plain_nbytes        the peak of plain torch.compile
    plain_saved_nbytes  what plain torch.compile would hold
    inputs_nbytes       of parameters, buffers and other inputs that the region reads
    recomputed          how many ops backward runs again
    is_lossy            whether codes add errors
    is_plain            whether all is as in plain torch.compile
    fuses_alike         whether bits depend on which loops are fused
    """

    peak_nbytes: int
    saved_nbytes: int
    plain_nbytes: int
    inputs_nbytes: int
    recomputed: int
    plain_saved_nbytes: int = 0
    is_lossy: bool = False
    is_plain: bool = True
    fuses_alike: bool = False
