"""The mean and variance of rows, which codes of some tensors are normalized by."""

import pytest
import torch
from torch import Tensor

from elbowroom.runtime import normal
from elbowroom.runtime.normal import of_rows, statistics_of_rows, var_mean

LARGE = torch.randn(3000, 64, generator=torch.Generator().manual_seed(0))  # several parts


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(LARGE, id="several parts"),
        pytest.param(LARGE * 1e-3 + 50, id="a mean far above the spread"),
        pytest.param(LARGE + 5, id="a mean nearly as far above the spread as sums allow"),
        pytest.param(torch.zeros(4, 64), id="zeros"),
        pytest.param(LARGE.view(2, 1500, 64).transpose(0, 1), id="not in order"),
        pytest.param(LARGE.bfloat16(), id="bfloat16"),
        pytest.param(LARGE.double(), id="double"),
        pytest.param(LARGE[0], id="one row"),
        pytest.param(LARGE[:1, :1], id="one element"),
        pytest.param(torch.full((4, 64), 2e37), id="a sum that is too large"),
    ],
)
@pytest.mark.parametrize("dim", [-1, 0])
def test_they_are_those_of_torch(x: Tensor, dim: int) -> None:
    wide = x.double()
    spread, mean = torch.var_mean(wide, dim=dim, correction=0, keepdim=True)
    found, middle = var_mean(x, dim)
    assert found.shape == middle.shape == mean.shape
    assert found.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(middle.double(), mean, rtol=1e-5, atol=1e-6)
    # What is lost of a variance is lost as the mean is rounded.
    torch.testing.assert_close(found.double(), spread, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize(
    ("x", "by_sums"),
    [
        (LARGE, True),
        (torch.zeros(4, 64), True),
        (LARGE + 3, True),
        (LARGE + 30, False),  # squares differ by a thousandth, of which float32 has lost a part
        (LARGE * 1e19, False),
        (LARGE.bfloat16(), False),
    ],
)
def test_two_sums_of_torch_suffice_where_a_mean_is_near_0(x: Tensor, by_sums: bool) -> None:
    asked = []

    def counted(x: Tensor) -> Tensor | None:
        asked.append(x)
        return statistics_of_rows(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normal, "statistics_of_rows", counted)
        var_mean(x)
    assert len(asked) == (not by_sums)


def test_a_nan_stays_in_its_row() -> None:
    x = LARGE.clone()
    x[7, 3] = float("nan")
    mean, _ = of_rows(x, keep_zeros=False)
    assert mean.isnan().flatten().nonzero().tolist() == [[7]]
