"""Sums in compiled graphs whose order may differ from plain torch.compile's."""

import pytest
import torch
from torch import nn

from elbowroom.compiled import Regions, Settings
from elbowroom.compiled.decision import Decision
from elbowroom.compiled.partition import Partitioner, listening
from uncompiled import nothing_compiled as nothing_compiled
from uncompiled import without_codegen

pytestmark = pytest.mark.usefixtures("one_thread", "nothing_compiled")


@pytest.mark.parametrize(("norm", "channels"), [("group", 12), ("group", 16), ("batch", 12)])
def test_sums_over_groups_of_channels_that_fill_no_vector_are_said(norm, channels, caplog) -> None:
    """Of one net their bits differed from plain torch.compile's, with exact=True and in silence."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for at in range(4):
        made = nn.GroupNorm(4, channels) if norm == "group" else nn.BatchNorm2d(channels)
        layers += [nn.Conv2d(channels if at else 3, channels, 3, padding=1), made, nn.SiLU()]
    net, x = nn.Sequential(*layers), torch.randn(16, 3, 24, 24)

    def decide(room: int | None) -> Decision:
        torch._dynamo.reset()
        found: list[Decision] = []
        with listening(found.append):
            backend = without_codegen(Partitioner(room))
            torch.compile(net, backend=backend)(x).square().mean().backward()
        return found[0]

    plain = decide(None)
    assert not plain.is_uncertain
    tight = decide(int(0.9 * plain.plain_nbytes))
    assert not tight.is_plain
    is_said = norm == "group" and channels % 16 != 0
    assert tight.is_uncertain == is_said
    for exact in (True, None):
        caplog.clear()
        Regions(Settings(100, exact=exact)).decided(tight)
        warned = [one for one in caplog.records if one.levelname == "WARNING"]
        assert len(warned) == (exact is True and is_said)
        assert all("exact=True. Take a multiple of 16" in one.getMessage() for one in warned)
