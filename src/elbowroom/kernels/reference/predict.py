"""Lorenzo prediction of integers in maps: what is coded is the difference from the neighbors.

    r[i, j] = q[i, j] - q[i, j-1] - q[i-1, j] + q[i-1, j-1]        outside of a map q is 0

Integers, so nothing is lost. q is a function of one element, also where that is not coded (0 for a
zero; from the element itself in a raw block), so the encoder needs no order, and the decoder, which
goes left to right and top to bottom, starts anew at each of them. A zero next to a coded value is a
good prediction: ReLU's maps fall to 0 without a jump.
(Dual quantization: cuSZ, arXiv 2007.09625.)
"""

from torch import Tensor
from torch.nn.functional import pad


def maps_of(x: Tensor, rows: int, columns: int, inner: int) -> Tensor:
    """x [N] -> [outer, rows, columns, inner]; the last one is filled up with 0."""
    size = rows * columns * inner
    return pad(x, (0, -x.numel() % size)).view(-1, rows, columns, inner)


def residuals(q: Tensor, rows: int, columns: int, inner: int) -> Tensor:
    """r [N]."""
    maps = maps_of(q, rows, columns, inner)
    across = maps - pad(maps, (0, 0, 1, 0))[:, :, :-1]
    both = across - pad(across, (0, 0, 0, 0, 1, 0))[:, :-1]
    return both.reshape(-1)[: q.numel()]


def restored(
    r: Tensor, coded: Tensor, known: Tensor, rows: int, columns: int, inner: int
) -> Tensor:
    """q [N]: from r where coded, else known."""
    flat, n = [], r.numel()
    r, coded, known = (maps_of(part, rows, columns, inner) for part in (r, coded, known))
    above = r.new_zeros(r.shape[0], columns + 1, inner)  # one column more, of zeros, on the left
    for i in range(rows):
        row = above.new_zeros(above.shape)
        for j in range(columns):
            predicted = row[:, j] + above[:, j + 1] - above[:, j]
            chosen = coded[:, i, j]
            row[:, j + 1] = (predicted + r[:, i, j]).where(chosen, known[:, i, j])
        flat.append(row[:, 1:])
        above = row
    maps = r.new_empty(r.shape)
    for i, row in enumerate(flat):
        maps[:, i] = row
    return maps.view(-1)[:n]
