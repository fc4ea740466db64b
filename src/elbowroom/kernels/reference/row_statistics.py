"""Mean, variance, least and largest value of each row.

by row of D elements, x wide:
mean = sum(x) / D;   variance = sum((x - mean)^2) / D;   least = min(x);   most = max(x)
"""

import torch
from torch import Tensor


def row_statistics(x: Tensor, width: int) -> Tensor:
    """x [R * width] -> mean, variance, least and most [4, R] float32. All are NaN if any x is."""
    rows = x.double().view(-1, width)
    variance, mean = torch.var_mean(rows, dim=1, correction=0)
    least, most = torch.aminmax(rows, dim=1)
    return torch.stack((mean, variance, least, most)).float()
