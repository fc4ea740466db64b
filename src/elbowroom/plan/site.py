"""A site is a place in the step where a tensor is saved.

What is known of it is known without looking at a value.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf, prod
from operator import attrgetter
from typing import NamedTuple, Self

import torch

from elbowroom.codecs import Facts

NORMS = ("batch_norm", "instance_norm", "layer_norm", "group_norm")  # as consumers
SMALL = "small"  # why a storage is kept that is not worth an action
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # as consumers
CHECKPOINT = "checkpoint"  # as the consumer of what a checkpoint of the user's saves
RECOMPUTE = "recompute"  # the op that saves a region's inputs, as the runtime calls it
AGAIN = CHECKPOINT, RECOMPUTE  # ops that run a piece of forward again from what they save
MIN_WIDTH = 8  # elements: what is shorter is no row of a norm, and 6 bytes for each cost too much
MIN_FEATURES = 32  # ... of readers that do not divide by the size themselves
HALF_LEVELS = 4096  # stands for a float of 16 bits
_NBYTES = 6  # of a row: a mean in float32, 1 / std in bfloat16


def prefix(nth: int) -> str:
    """Returns the prefix of all module names in the nth forward of a step, from 1."""
    return "" if nth == 1 else f"call {nth}: "


NO_MODULE = "(no module)"  # in tables: of an op that no module has called, a loss often


def without_prefix(name: str) -> str:
    """The module's own name."""
    return re.sub(r"^call \d+: ", "", name) if name.startswith("call ") else name


class SiteName(NamedTuple):
    """The name of a save in a step: module, op, and how many saves this op has made before."""

    module: str
    consumer: str
    nth: int = 0


class Need(Enum):
    """The part of a saved tensor that the backward of its op asks for."""

    EXACT = "exact"  # its value, bit for bit: the op is not known to tolerate an error
    LOSSY = "lossy"  # its value; an unbiased error only adds noise to a gradient
    MASK = "mask"  # where it is positive, nothing else (ReLU)
    SHAPE = "shape"  # its shape and strides, no value (pooling)


class Formula(Enum):
    """The way in which an op's derivative formula uses the value of a saved tensor.

    The first eight tolerate an unbiased error (`plan/precision_floor.py` says how large a one); the
    others do not, and `shape` reads no value at all.
    """

    SUMMED = "summed"  # in sums over many elements (matmul, a norm's means): errors average out
    MATRIX = "matrix"  # of a batch of products (bmm), or of two activations: few are summed
    PRODUCT = "product"  # linear, element by element: the error goes on upstream as it is
    CURVED = "curved"  # a smooth function of it with bounded derivatives (tanh, a cube)
    PROBABILITY = "probability"  # a softmax, an exp: small values matter as much as large ones
    LOG_PROBABILITY = "log-probability"  # exp of it, at most 0: an error becomes a relative one
    TAIL = "tail"  # a sigmoid of it, which far from 0 is exp of it, or 1 less that: likewise
    RELATIVE = "relative"  # a power of it, also a negative one: an error of its size stays one
    SHAPE = "shape"  # its shape and strides
    COMPARED = "compared"  # its order or sign: a small error turns a gradient on or off
    PERIODIC = "periodic"  # a sine of it: its range may be many turns, and a code's step a few
    SINGULAR = "singular"  # it is divided by, or taken the logarithm or root of
    DIFFERENCE = "difference"  # what is left of it after a subtraction, or a tail, may be far less
    STATISTIC = "statistic"  # a weight, mean, norm or scale, which every element depends on
    INDEX = "index"  # an integer or boolean that selects
    UNKNOWN = "unknown"  # the op is not in the table

    @property
    def tolerates_errors(self) -> bool:
        """True if an unbiased error of the value only adds noise to the gradient."""
        return self in _TOLERANT


FINE = (  # those in which the error of a coarse code would not average out
    *(Formula.PRODUCT, Formula.CURVED, Formula.PROBABILITY),
    *(Formula.LOG_PROBABILITY, Formula.TAIL),
)
# Of these, a float of 16 bits has an error that is a share of each element.
_FACTORS = (Formula.PRODUCT, Formula.MATRIX, Formula.PROBABILITY, Formula.RELATIVE)
_TOLERANT = (Formula.SUMMED, Formula.MATRIX, *FINE, Formula.RELATIVE)


class Reads(Enum):
    """Form in which a backward reads a tensor that is held as bits or as a code.

    See `runtime/direct/`.
    """

    RESTORED = "restored"  # the tensor, which takes memory of its own until it is read
    BITS = "bits"  # a bitmap (ReLU, dropout)
    CODE = "code"  # that of the normalized input, decoded to its gradient (batch norm)
    SAMPLES = "samples"  # what is decoded, a few samples at a time (convolution)
    GRADIENT = "gradient"  # what is decoded to where the gradient will be (layer norm, GELU, SiLU)
    PLACE = "place"  # the tensor, decoded or rebuilt to where the gradient will be (products)
    ROWS = "rows"  # the tensor, some rows at a time: the gradient takes its place (cross entropy)
    SIZES = "sizes"  # no values: sizes alone (pooling), or nothing (`RESULT`)


# How a profile says that attention's result is read: by torch's own backward, which needs it, and
# where a node of ours runs attention again from q, k and v, and needs nothing of it.
RESULT = (Reads.GRADIENT, Reads.SIZES)


class Rebuildable(Enum):
    """Tells whether the tensor can be rebuilt from what its producer saves anyway."""

    NO = "no"
    LOSSY = "lossy"  # yes, but what it is made from is held by a lossy code
    EXACT = "exact"
    FROM_EXACT = "from exact"  # in a profile: yes, but from exact tensors alone


class Rows(NamedTuple):
    """Rows whose own size a backward divides by, as a dense tensor whose last dimension is one row.

    RMSNorm and LayerNorm written out, for two:

        y = x * rsqrt(mean(x^2) + eps)        over each row of x

    Its gradient multiplies what a code adds to a row by 1 / rms of that row: harmless where the
    error is small against the row, and a row of zeros (a padding token's embedding) has an rms of
    sqrt(eps). Codes know nothing of rows. A group of 64 reaches from a row of 96 into the next one,
    whose size then sets the step (gErr2 4e13 by rows of zeros), and `dither` rounds the lowest
    value of a group by the range of its tile of 2048. So such rows are coded as what a norm would
    make of them, (x - mean) / std, each by its own (`runtime/normal.py`), at 6 bytes a row.

    Other readers meet the large gradients that such a norm makes: of them it is enough that a step
    belongs to one row, by groups that fill whole rows where there are any.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of what the rows are normalized by."""
        return _NBYTES * prod(self.shape[:-1])

    def are_filled(self, group_size: int) -> bool:
        """Returns whether each row has whole groups."""
        return self.stride[-1] == 1 and self.shape[-1] % group_size == 0


class HalfSuffices(str):
    """Reason for which a site has no code of few levels; one of half its bits suffices.

    For a product: an error that is a share of each element stays one.
    """

    __slots__ = ()


class LevelsSuffice(str):
    """Reason for which a site has a code of so many levels at the least."""

    levels: int

    def __new__(cls, why: str, levels: int = 0) -> Self:
        found = super().__new__(cls, why)
        found.levels = levels
        return found


def strictness(why: str) -> float:
    """Returns a number that orders the reasons for a site, by how much of it has to be held."""
    if isinstance(why, LevelsSuffice):
        return why.levels
    return HALF_LEVELS if isinstance(why, HalfSuffices) else inf


SiteKey = tuple[str, str, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Site:
    """Facts of one save.

    why     says, where `need` is EXACT, which rule made it so; the ledger shows it
    nth     how many tensors this op of this module has saved before, in this step; negative: the
            result of an attention, which torch's op saves, and ours, which ran, does not
    reads   what its backward reads, unless the tensor itself is kept
    formula how the saving op's derivative uses the value
    curved  an op whose formula is fine reads what is made of it; or, of what such an op saves: what
            that is made of has a code for it; None: not known yet
    least_levels  how many a code of it must have: by attention's logits (`precision_floor.py`), or
            as fewer were found to make gradients wrong
    rows    that a code should keep apart (`Rows`); by_size: that it must
    samples that its backward takes at once, where it takes turns
    summed  elements that each element of a gradient sums over, where the op reads the storage in
            another shape than `shape` (`summed_over`); None: as `shape` says
    of_logits  it can be rebuilt by a softmax of the product of q and k, whose codes are as fine as
            their logits need (`least_levels`), so that it is as fine as any reader needs
    """

    module: str
    consumer: str
    producer: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    need: Need
    rebuildable: Rebuildable = Rebuildable.NO
    facts: Facts = field(default_factory=Facts)
    why: str = ""
    nth: int = 0
    reads: Reads = Reads.RESTORED
    formula: Formula = Formula.UNKNOWN
    curved: bool | None = None
    least_levels: int = 16
    rows: Rows | None = None
    by_size: bool = False
    samples: int = 0
    summed: int | None = None
    of_logits: bool = False

    @property
    def name(self) -> SiteName:
        """The name of the site, which is the same in every step that runs the same code."""
        return SiteName(self.module, self.consumer, self.nth)


# What is learned of a site is learned of all that this op of this module saves alike.
key_of: Callable[[Site], SiteKey] = attrgetter("module", "consumer", "shape", "dtype")


def limited(site: Site, why: str) -> Site:
    """Returns what a site allows once a code of few levels was found to make gradients wrong there.

    That is a code of as many levels as `LevelsSuffice` says, a float of 16 bits (`HalfSuffices`, of
    a factor), or the tensor itself.
    """
    if isinstance(why, LevelsSuffice) and site.need is Need.LOSSY:
        return replace(site, least_levels=max(site.least_levels, why.levels), why=why)
    is_factor = site.formula in _FACTORS
    is_lossy = site.need is Need.LOSSY and site.dtype is torch.float32
    if isinstance(why, HalfSuffices) and is_factor and is_lossy:
        return replace(site, formula=Formula.RELATIVE, why=why)
    return replace(site, need=Need.EXACT, formula=Formula.SINGULAR, why=why)
