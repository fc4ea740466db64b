"""Milder codes where the error of a coarse one does not average out: floors by formula.

    formula of the reader             at least
    summed, over 256 elements or more what was asked for
    summed, over fewer                16 levels     (a norm over 4 samples of 3 x 3, 16 flat maps)
    of a matrix of a batch            32 levels     (bmm; a product of two activations, as q k^T)
    ... of results of a ReLU          256 levels    (attention without a softmax divides by it;
                                                    with a product they stay exact)
    product, curved                   16 levels     (a gate, GELU, SiLU, tanh, a power)
    ... of what a norm makes          32 levels of the norm's input, which all of them share
    tail                              128 levels    (softplus: in its tails exp of it)
    log-probability                   256 levels    (log-softmax: exp of it; of what is above -24)
    probability                       8-bit floats  (softmax, exp: small values matter as much),
                                      or made again from q and k that attention's floors hold for
    relative                          16-bit floats (it divides, or a root or logarithm is taken)
    attention's q and k               16 to 256 levels, by their logits; 16-bit floats (fp16)
                                                    where those are sharper yet
    attention's bias                  16 to 256 levels, by the range of those that share a step
    attention's v                     16 to 256 levels, by how it varies over tokens, and half of
                                                    the step where logits are sharp

A code of 16 levels adds 0.75 % to the square of what is multiplied with a normal tensor, and twice
that where rows have one large element (the inverse of I + A in a delta rule). What is a product of
two activations passes this on upstream, and so do the next ones of a recurrence that is written as
matrices: with 16 levels, two layers of a gated delta rule, 24 products each, had a gErr2 of 0.084,
with 32 levels 0.035. Such tensors are small beside those of the layers around them (docs/log.md,
"Products of activations").

Attention runs again in backward, on what is held of q, k and v (`runtime/direct/attention/`). An
error of variance s^2 in a logit changes the gradient's square by s^2 of it where weights are spread
over many keys, by half of that where they are sharp; the codes of k and v, in which it is linear,
add what they add to a linear op (16 levels: 0.8 % each). s^2 grows with the product of the squares
of |q| and |k|, so what q and k need follows from them (`levels_for`): 16 levels where they have a
standard deviation of 1, 64 at 2, 256 up to nearly 5.5. Beyond that, fp16 does up to some 200, as an
element's error is at most 2^-11 of it (float32, on a CPU, where values are examined). Means are
weighted by |row|^6, as softmax follows the longest: one key 15 times as long as 127 others gave q a
gErr2 of 0.13 with 16 levels, and has 256 now (0.01). v's error counts against its variance over
tokens (`levels_for_values`), since what they have in common cancels: a channel that is off by 50
gave q and k a gErr2 of 1.0 with 16 levels, and 0.03 with the 128 that it has now. Where logits are
sharp, nearly all of a gradient goes through them, and so does the error of v: a quarter of it is
allowed there (unscaled logits of a standard deviation of 6: gErr2 of four layers 0.061 -> 0.043).
Floors count the error that a code makes of normal data, in levels of the dither that makes as large
a one: of groups by stochastic rounding, which have twice the variance, 16 levels ask for 5 bits.

Measured (docs/log.md, "attention"), gErr2 of q at standard deviations of 1, 3, 6:

                    1        3        6
    16 levels       0.029    0.44     1.3
    64 levels       0.010    0.04     0.35
    256 levels      0.008    0.011    0.035

A smooth function with bounded derivatives is biased a little by an error in its input: with s^2 the
variance of the error, by half of s^2 times a second or third derivative. Where a norm and the
activation behind it share a code, their errors multiply besides. So the square of the bias falls
with (levels - 1)^4 where the variance falls with (levels - 1)^2. And the errors of layers add up:
an EfficientNet with 49 norms had a gErr2 of 0.27 with 8 levels, 0.09 with 16 and 0.03 with 32
(docs/log.md, "public models"). A ReLU is linear in what is decoded. Rows whose
size a norm divides by: `Rows` in `site.py`.

A piece of forward that the user's checkpoint runs again from a decoded input is curved all over,
and its ReLUs pass what they did not: what that adds to gErr2 (`dither`; public models, docs/log.md)

    levels      4        16       64
    Llama       0.005    0.0002   0.00001
    ViT         0.12     0.006    0.0003
    ResNet-50   0.13     0.03     0.005

The exp of a log-probability turns its absolute error into a relative one, and the step of a code
follows the range of what shares it: with logits of a standard deviation of 60, gErr2 was 0.06, of
600, 5,800. What is below -24 is therefore encoded as -24 (`Encode.least`): a step of 0.094 at most,
whatever the logits are. Who reads anything but exp of it has it exactly. Once they are decoded, its
exponentials are made to add up to 1 again along their dimension (`Encode.adds_up`): else 1 - p of a
label that is nearly certain is what is left of two numbers (gErr2 up to 3,800), and the gradient of
a row of logits adds up to something (a contrastive loss of a temperature of 0.01: 300). A
gradient's square is off by the variance of a log-probability at most, so fewer levels do where
those that share a step differ by less (`levels_for_range`: by hand, on a CPU, as they are encoded).

Where a divisor, or what a power, root or logarithm is taken of, is read as a power of itself, an
error that is a share of each element stays one: bf16 has 2^-9 of it at most, however small the
element is beside its neighbors, and a range as wide as float32. A step that follows a range has no
such bound (factors of 8 to 13,000 with 4 levels). The same code takes the place of one that was
found too coarse, or whose rows lie in no order that is known.

A softplus has a sigmoid as its derivative. Where something divides by a small scale softplus(x), or
subtracts 1 (a cross entropy by hand), the tails of that sigmoid are all that is left, and they are
exponentials of x: gErr2 with 16, 64 and 128 levels (docs/log.md, "softplus")

    normal distribution, scale softplus(x), x of std 3, 10      0.11, 0.003, 0.001; 1.5, 0.02, 0.005
    softplus(x) - x y of logits that fit, std 5, 20             0.08, 0.004, 0.001; 1.2, 0.08, 0.02

So the inputs of a checkpoint, and of a module that a plan runs again, get at least 32. The gates of
a recurrent layer are as smooth as SiLU.
"""

from dataclasses import replace
from functools import lru_cache
from math import prod

from elbowroom.codecs import Cast, Codec, Comet, Dither, Division, Group, Sided
from elbowroom.codecs.quality import quality_of
from elbowroom.kernels.layout import GROUP_SIZES
from elbowroom.plan.site import AGAIN, NORMS, Formula, Rebuildable, Rows, Site

ATTENTION = "scaled_dot_product_attention"
CURVED = ("gelu", "silu")
MAX_LEVELS = 256
MIN_BIAS = -128.0  # of attention: what is below has no weight, as far as `spread_of_bias` says so
MIN_LOG_PROBABILITY = -24.0  # exp of it is 4e-11: whatever is below adds no more to a gradient
UNSEEN_LEVELS = 32  # of v, where its values are not examined
_FINE, _MATRIX, _SHARED, _TAIL = 16, 32, 32, 128
MIN_RECOMPUTED_LEVELS = 32  # of the inputs of what runs again
FEW = 256  # summed elements, of which errors do not average out
_FLOORS = {
    Formula.MATRIX: _MATRIX,
    Formula.PRODUCT: _FINE,
    Formula.CURVED: _FINE,
    Formula.LOG_PROBABILITY: MAX_LEVELS,
    Formula.TAIL: _TAIL,
}
_PROBABILITIES, _RELATIVE = Cast("fp8_e4m3"), Cast("bf16")
_MASKED_PROBABILITIES = replace(_PROBABILITIES, sparse=True)
LEVELS = 16, 32, 64, 128, MAX_LEVELS
_GROUP = 64  # elements that share a step, as in the dither by whose levels floors are counted
_DIFFUSE, _SHARP = 0.027, 0.055  # variance of a logit: of what 256 levels meet, weights are sharp
_OF_LOGARITHM = 0.01  # variance of a log-probability: the share of a probability's square
_LINEAR = 0.02  # of v's variance: what its code may add to the gradients of q and k
_LINEAR_OF_SHARP = 0.005  # ... where logits need more than 16 levels: weights are not even
_BOUND = 0.3  # of `comet`, times (levels - 1): half a step, as a share of a larger range
_MAX_BITS = 8


def levels_for(spread: float) -> int | None:
    """The fewest levels for q and k where a logit's error has the variance spread / (levels - 1)^2.

    None: no code is fine enough; also of a NaN.
    """
    for levels in LEVELS:
        if spread <= (_SHARP if levels == MAX_LEVELS else _DIFFUSE) * (levels - 1) ** 2:
            return levels
    return None


def levels_for_bias(whole: float, grouped: float) -> int | None:
    """The fewest levels for a bias of attention; None: no code is fine enough; also of a NaN.

    Half of the variance is allowed that q and k may have, which are coded beside it.

    whole, grouped: the variance of its error, times (levels - 1)^2, if all of it shares a step, or
    64 elements do, as in codes of more than 16 levels
    """
    if whole <= _DIFFUSE / 2 * (LEVELS[0] - 1) ** 2:
        return LEVELS[0]
    found = levels_for(2 * grouped)
    return found and max(found, LEVELS[1])


def fewest_levels(asked: Codec | None) -> int:
    """The levels that a dither of log-probabilities may have, if their range allows it.

    asked: by hand; plans count on the most
    """
    return max(asked.levels, LEVELS[0]) if isinstance(asked, Dither) else MAX_LEVELS


def levels_for_range(width: float, fewest: int) -> int:
    """The levels for log-probabilities of which those that share a step differ by `width` at most.

    Also of a NaN: as many as there are.
    """
    enough = (n for n in LEVELS if n >= fewest and width**2 / 12 <= _OF_LOGARITHM * (n - 1) ** 2)
    return next(enough, MAX_LEVELS)


def half_suffices(spread: float) -> bool:
    """Returns whether fp16 will do, with a variance of a logit of 2^-20 times `spread`."""
    return spread * 2**-20 <= _SHARP


def levels_for_values(spread: float, logits: int | None) -> int | None:
    """The fewest levels for v where its error's share of its variance is spread / (levels - 1)^2.

    None: no code is fine enough; also of a NaN. logits: the levels that q and k need
    """
    share = _LINEAR if logits == LEVELS[0] else _LINEAR_OF_SHARP
    return next((n for n in LEVELS if spread <= share * (n - 1) ** 2), None)


def at_precision_floor(codec: Codec, site: Site) -> Codec:
    """The codec itself, or a milder setting of it."""
    if site.formula is Formula.RELATIVE:
        is_half = isinstance(codec, Cast) and not codec.to.startswith("fp8")
        return codec if codec.lossless or is_half else _RELATIVE
    if site.consumer == ATTENTION:
        return at_least(codec, site.least_levels)
    if site.formula is Formula.PROBABILITY:
        if codec.lossless or isinstance(codec, Cast):
            return codec
        return _MASKED_PROBABILITIES if site.facts.has_zeros else _PROBABILITIES
    floor = max(_floor_of(site), site.least_levels if site.least_levels > _FINE else 0)
    apart = site.formula is Formula.MATRIX or site.least_levels > _FINE
    return _with_levels(codec, floor, apart=apart) if floor else codec


def suffices(codec: Codec, site: Site) -> bool:
    """Returns whether the site, too, may read what this codec holds."""
    return at_precision_floor(codec, site) == codec


def coded_rows(rows: Rows, codec: Codec, *, by_size: bool) -> tuple[Codec, Rows | None]:
    """The codec to take for these rows, and they themselves if they are to be normalized.

    by_size: the reader divides by the size of each row
    """
    if codec.lossless or (isinstance(codec, Cast) and not codec.to.startswith("fp8")):
        return codec, None  # what it adds to an element depends on this element alone
    size, by_group = getattr(codec, "group_size", 0), isinstance(codec, Cast | Group)
    # The values of a tile of a dither share more than the range of their group.
    may_differ = isinstance(codec, Group) or not by_size
    filling = _filling(rows, size, stays=by_group, may_differ=may_differ)
    if not filling:
        return codec, rows
    return codec if filling == size else replace(codec, group_size=filling), None  # type: ignore[call-arg]


@lru_cache(1024)
def _filling(rows: Rows, size: int, *, stays: bool, may_differ: bool) -> int:
    """Returns the size of groups of which each row has whole ones; 0: there is none.

    stays: `size` may be it. may_differ: a smaller one may be, too
    """
    if stays and size and rows.are_filled(size):
        return size
    filled = (n for n in GROUP_SIZES if n <= size and rows.are_filled(n))
    return max(filled, default=0) if may_differ else 0


def keeps_rows_apart(codec: Codec, site: Site, *, normalized: bool) -> bool:
    """Returns whether a held code is near enough to each row whose size the site reads.

    normalized: it stands for rows that were normalized by themselves
    """
    rows = site.rows
    if rows is None or normalized or not (site.by_size or site.consumer == "layer_norm"):
        return True
    return coded_rows(rows, codec, by_size=site.by_size) == (codec, None)


def _floor_of(site: Site) -> int:
    """The fewest levels of a code at this site; 0: any."""
    if site.consumer in AGAIN:
        return MIN_RECOMPUTED_LEVELS
    if site.formula is Formula.MATRIX and site.facts.has_zeros:
        # One that is rebuilt has its zeros by bits, and the levels of its source.
        return MAX_LEVELS if site.rebuildable is Rebuildable.NO else _MATRIX
    if site.formula in _FLOORS:
        return _FLOORS[site.formula]
    if site.curved:
        return _SHARED
    return _FINE if _sums_few(site) else 0


def _sums_few(site: Site) -> bool:
    """Returns whether so few elements are summed that their errors do not average out."""
    if site.formula is not Formula.SUMMED:
        return False
    if site.summed is not None and site.summed < FEW:
        return True
    return len(site.shape) > 1 and summed_over(site.shape, site.consumer) < FEW


@lru_cache(4096)
def summed_over(shape: tuple[int, ...], consumer: str) -> int:
    """Returns how many elements of an x of this shape one element of a gradient sums over.

    Of a linear layer it is the number of rows: 16 for images of 16 x 16 x 16 that are flattened to
    (16, 4096). Of a vector it is 1.
    """
    if len(shape) < 2:
        return 1
    by_channel = consumer.startswith("conv") or consumer == "batch_norm"
    return prod(shape) // max(shape[1] if by_channel else shape[-1], 1)


def if_curved(codec: Codec, site: Site) -> Codec | None:
    """Returns the action for a norm's input if a fine formula turns out to read the norm's output.

    None: the same, or that is known already.
    """
    if site.consumer not in NORMS or site.curved is not None:
        return None
    found = at_precision_floor(codec, replace(site, curved=True))
    return None if found == at_precision_floor(codec, site) else found


def at_least(codec: Codec, levels: int) -> Codec:
    """The codec, or a setting of it with about the error of so many levels of dither, of q or k."""
    if levels > MAX_LEVELS:
        is_half = isinstance(codec, Cast) and codec.to == "fp16"
        return codec if codec.lossless or is_half else Cast("fp16")
    is_fp8 = isinstance(codec, Cast) and codec.to.startswith("fp8")
    if levels > LEVELS[0] and is_fp8:
        return Dither(levels=levels)
    return _with_levels(codec, levels, apart=levels > LEVELS[0])


def _with_levels(codec: Codec, levels: int, *, apart: bool) -> Codec:
    """The codec, or a setting of it with about the error of so many levels of dither.

    That is on normal data, and of what rounds stochastically, which has twice the variance or more,
    it is a bit more. `dither` takes the place of what has no setting that is fine enough.

    apart: at most _GROUP values share a step, because rows of the data may differ in size
    """
    bits = (2 * (levels - 1)).bit_length()
    if apart and isinstance(codec, Dither | Group) and codec.group_size > _GROUP:
        codec = replace(codec, group_size=_GROUP)
    match codec:
        case Dither():
            return codec if codec.levels >= levels else replace(codec, levels=levels)
        case Group() | Division() if bits <= _MAX_BITS:
            return replace(codec, bits=max(codec.bits, bits))
        case Comet() if codec.relative:
            return replace(codec, bound=min(codec.bound, _BOUND / (levels - 1)))
    return codec if _is_fine_enough(codec, levels) else Dither(levels=levels)


def _is_fine_enough(codec: Codec, levels: int) -> bool:
    """Returns whether what has no setting for so many levels is as fine as it is.

    What is biased never is, unless it is a float or finer than any dither.
    """
    if codec.lossless or isinstance(codec, Comet):
        return True
    if isinstance(codec, Cast):
        is_half = not codec.to.startswith("fp8")
        return is_half or quality_of(Cast(codec.to), maps=True).levels >= levels
    if isinstance(codec, Sided):
        return min(codec.upper, codec.lower) >= levels
    quality = quality_of(codec, maps=True)  # the larger error, where there are two
    return quality.levels >= (levels if quality.unbiased else MAX_LEVELS)
