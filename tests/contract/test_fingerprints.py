"""Fingerprints of tensors: the same of every backend, and other ones for other bits."""

import pytest
import torch

from elbowroom.kernels import numba, reference

BACKENDS = pytest.mark.parametrize("backend", [reference, numba], ids=["torch", "numba"])


def words_of(x: torch.Tensor) -> int:
    return -(-x.nbytes // 8)


def test_all_backends_agree():
    draw = torch.Generator().manual_seed(0)
    sizes = 0, 1, 2, 3, 7, 64, 1000, 4099
    xs = [torch.randn(n, generator=draw).to(t) for n in sizes for t in (torch.half, torch.double)]
    xs += [torch.randn(9, generator=draw)[1:], torch.randn(3, generator=draw).half()[1:2]]
    xs.append(torch.randn(2, 3, 4, 5, generator=draw).to(memory_format=torch.channels_last))
    xs.append(torch.tensor(1.0))
    for share in (1, 3, 50):
        words = [-(-words_of(x) // share) for x in xs]
        assert torch.equal(reference.fingerprint(xs, words), numba.fingerprint(xs, words))
    assert numba.fingerprint([], []).shape == reference.fingerprint([], []).shape == (0,)


CHANGES = {
    "a bit": lambda x: x.view(torch.int32)[3].bitwise_xor_(1),
    "the sign of zero": lambda x: x[:1].zero_().neg_(),
    "all signs": lambda x: x.neg_(),
    "two signs": lambda x: x[4:6].neg_(),
    "the order": lambda x: x.copy_(x.flip(0)),
    "two neighbors": lambda x: x[:2].copy_(x[:2].flip(0)),
    "two words": lambda x: x[:4].copy_(x[:4].roll(2)),
    "the last one": lambda x: x[-1:].mul_(0.5),
    "by a constant": lambda x: x.mul_(0.999),
}


@BACKENDS
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("n", [8, 9, 320, 1001])
def test_other_bits_have_another_fingerprint(backend, change, n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    x[0] = 0
    before = backend.fingerprint([x], [words_of(x)])
    assert torch.equal(backend.fingerprint([x.clone()], [words_of(x)]), before)
    CHANGES[change](x)
    assert not torch.equal(backend.fingerprint([x], [words_of(x)]), before)


@BACKENDS
def test_the_words_that_are_read_lie_in_all_columns_of_a_matrix(backend):
    """In steps of one length, they would lie in the same column of a matrix of 1024 rows."""
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    before = backend.fingerprint([x], [16])
    seen = set()
    for at in range(0, 1024, 2):
        x[:, at] += 1
        now = backend.fingerprint([x], [16])
        if not torch.equal(now, before):
            seen.add(at)
        x[:, at] -= 1
        before = backend.fingerprint([x], [16])
    assert len(seen) >= 14
