"""Maps: how a dense tensor lies in memory, for the codecs of maps."""

import pytest
import torch

from elbowroom.codecs.facts import Maps

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


@pytest.mark.parametrize(
    ("x", "maps"),
    [
        (torch.empty(2, 3, 5, 7), (6, 5, 7, 1)),
        (torch.empty(2, 3, 5, 7).to(memory_format=LAST), (2, 5, 7, 3)),
        (torch.empty(2, 3, 4, 5, 7), (24, 5, 7, 1)),
        (torch.empty(2, 3, 4, 5, 7).to(memory_format=LAST_3D), (8, 5, 7, 3)),
        (torch.empty(2, 3, 7, 5).transpose(2, 3), (6, 7, 5, 1)),
        (torch.empty(2, 3, 7), (6, 1, 7, 1)),
        (torch.empty(6, 7), (6, 1, 7, 1)),
        (torch.empty(7, 6).t(), (1, 1, 42, 1)),
        (torch.empty(7), (1, 1, 7, 1)),
        (torch.empty(()), (1, 1, 1, 1)),
        (torch.empty(0, 3, 5, 7), (0, 5, 7, 1)),
        (torch.empty(2, 3, 0, 7), (0, 0, 7, 1)),
    ],
)
def test_maps_of(x, maps):
    found = Maps.of(tuple(x.shape), x.stride())
    assert found == maps
    assert found.outer * found.rows * found.columns * found.inner == x.numel()
