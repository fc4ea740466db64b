"""Steps at random, for solvers: `chain` draws one with the sizes and times of a large GPU's.

35 % matrix products, 45 % elementwise ops, 20 % small tensors; 8 to 128 MB each (small: 0.05 to 1);
an op takes 5 us + (product: 3 ms per GB, times 3 to 12; else three passes at 2 TB/s); 8, 4 and 2
bits cost three passes and 16 us, times 1, 1.1 and 1.2; a link of 24 GB/s, 20 us a copy; backward
takes twice as long as forward. Elementwise ops may be rebuilt, blocks of 16 may be recomputed.
"""

import numpy as np

from elbowroom.plan.problem import Item, Link, Option, Problem, Region

BLOCK = 16
BANDWIDTH = 2e12
LINK = Link(24e9, 24e9)
CODES = {8: (0.26, 1.0, 2e-4), 4: (0.14, 1.1, 3e-3), 2: (0.08, 1.2, 5e-2)}  # share, cost, error


def chain(n: int, seed: int = 0, *, same_blocks: bool = False) -> Problem:
    """n tensors, each read by the next op and, in backward, before all that came earlier.

    same_blocks  all blocks are like the first
    """
    rng = np.random.default_rng(seed)
    drawn = min(n, BLOCK) if same_blocks else n
    kind = rng.choice(["matmul", "elementwise", "small"], drawn, p=[0.35, 0.45, 0.2])
    large = rng.choice([8, 16, 32, 64, 96, 128], drawn) * 1e6
    size = np.where(kind == "small", rng.uniform(0.05, 1, drawn) * 1e6, large).astype(int)
    op = 5e-6 + np.where(
        kind == "matmul", size / 1e9 * rng.uniform(3, 12, drawn) * 3e-3, 3 * size / BANDWIDTH
    )
    error = rng.lognormal(0, 1, drawn) * np.sqrt(size / size.mean())
    kind, size, op, error = (np.resize(of, n) for of in (kind, size, op, error))
    items = tuple(
        Item(
            int(size[i]),
            born=i,
            used=min(i + 1, n - 1),
            needs=((2 * n - 1 - i,) * 2,),
            freed=2 * n - 1 - i,
            options=_options(str(kind[i]), int(size[i]), float(op[i]), float(error[i])),
        )
        for i in range(n)
    )
    times = np.concatenate([op, 2 * op[::-1]])
    reserve = int(2 * size.max())
    return Problem(
        base=(0,) * n + (reserve,) * n,
        starts_s=tuple((np.cumsum(times) - times).tolist()),
        backward=n,
        seconds=float(times.sum()),
        items=items,
        regions=tuple(_block(first, size, op) for first in range(1, n - BLOCK + 1, BLOCK)),
        links={"host": LINK},
    )


def quarter_of_4_bits(problem: Problem) -> float:
    """The variance that the experiment of the notes allows."""
    return sum(o.variance for item in problem.items for o in item.options if o.name == "4 bits") / 4


def plain_nbytes(problem: Problem) -> int:
    """All items together."""
    return sum(item.nbytes for item in problem.items)


def _options(kind: str, nbytes: int, op_s: float, error: float) -> tuple[Option, ...]:
    pass_s = 3 * nbytes / BANDWIDTH + 16e-6
    codes = (
        Option(
            f"{bits} bits",
            int(share * nbytes),
            forward_s=pass_s * cost / 2,
            backward_s=pass_s * cost / 2,
            variance=error * noise,
            exact=False,
        )
        for bits, (share, cost, noise) in CODES.items()
    )
    options = [Option("keep", nbytes), *codes]
    options.append(Option("offload", 0, forward_s=1e-5, backward_s=1e-5, link="host", ahead=1))
    if kind == "elementwise":
        options.append(Option("rebuild", 0, backward_s=op_s))
    return tuple(options)


def _block(first: int, size: np.ndarray, op: np.ndarray) -> Region:
    inside = tuple(range(first, first + BLOCK))
    return Region(
        f"block {first // BLOCK}",
        inside,
        inputs=(first - 1,),
        seconds=float(op[list(inside)].sum()),
        workspace=int(size[list(inside)].max()),
        extra=0,
        born=first,
        start=2 * len(size) - first - BLOCK,
    )
