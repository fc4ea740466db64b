"""A frozen prefix whose outputs are read from a folder: the same values, or a refusal."""

import contextlib
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import elbowroom as er
from elbowroom.errors import DataError, ModuleError
from elbowroom.nn import CachedPrefix


def frozen(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
    return layers.eval().requires_grad_(False)


def images(n: int = 6, seed: int = 1) -> Tensor:
    return torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


class Counted(nn.Module):
    """A module that counts the rows that it computes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._rows = 0

    def forward(self, x: Tensor) -> Tensor:
        self._rows += len(x)
        result: Tensor = self.inner(x)
        return result


def test_each_sample_is_computed_once_in_any_order(tmp_path: Path) -> None:
    x, module = images(), Counted(frozen()).eval()
    plain = module.inner(x)
    prefix = CachedPrefix(module, tmp_path)
    assert torch.equal(prefix(x), plain)
    computed = module._rows  # the samples, and one of them alone
    order = torch.tensor([4, 0, 5, 5, 2])
    assert torch.equal(prefix(x[order]), plain[order])
    assert module._rows == computed
    assert (prefix.hits, prefix.misses) == (5, 6)
    again = CachedPrefix(Counted(frozen()).eval(), tmp_path)  # another process
    assert torch.equal(again(x), plain)
    assert (again.hits, again.misses) == (6, 0)


def test_a_sample_that_changed_is_computed_anew(tmp_path: Path) -> None:
    x, prefix = images(), CachedPrefix(frozen(), tmp_path)
    prefix(x)
    x[2, 0, 3, 3] += 1e-3
    assert torch.equal(prefix(x)[2], frozen()(x[2:3])[0])
    assert prefix.misses == 7
    assert prefix(x.double().float()).dtype == torch.float32
    assert torch.equal(CachedPrefix(nn.Identity().eval(), tmp_path / "b")(x), x)


def test_a_model_trains_as_it_does_without(tmp_path: Path) -> None:
    def losses(*, cached: bool, budget: str | None = None) -> list[float]:
        features: nn.Module = frozen()
        torch.manual_seed(3)
        head = nn.Sequential(nn.Flatten(), nn.Linear(144, 2))
        model = nn.Sequential(CachedPrefix(features, tmp_path) if cached else features, head)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        if budget is not None:
            er.fit(model, budget=budget, optimizer=optimizer)
        found = []
        for _ in range(6):
            model.train()
            if not cached:
                features.eval()
            optimizer.zero_grad()
            loss = model(images()).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses(cached=True) == losses(cached=False) == losses(cached=True, budget="64 MiB")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda module: module[0].weight[0, 0, 0, 0].add_(1e-6), "weights"),
        (lambda module: module[1].running_mean.add_(1), "weights"),
        (lambda module: setattr(module[1], "eps", 0.1), "settings"),
        (lambda module: module.append(nn.Tanh().eval()), "code and settings"),
    ],
)
def test_another_module_is_refused_by_checksum(tmp_path: Path, change, what: str) -> None:
    CachedPrefix(frozen(), tmp_path)(images())
    other = frozen()
    change(other)
    with pytest.raises(ModuleError, match=f"of other {what}, by their checksum; give another"):
        CachedPrefix(other, tmp_path)(images())
    prefix = CachedPrefix(module := frozen(), tmp_path)
    prefix(images())
    change(module)  # while it is used
    with pytest.raises(ModuleError, match=f"of other {what}"):
        prefix(images())


def exchanged(weight: Tensor) -> None:
    weight.data[[0, 1]] = weight.data[[1, 0]]


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.data.mul_(1.01),
        lambda weight: weight.numpy().__setitem__((1, 0, 1, 1), 9.0),
        lambda weight: weight.data[-1, -1, -1, -1].add_(1e-6),
        exchanged,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_change_without_a_version_are_refused(
    tmp_path: Path, change, dtype: torch.dtype
) -> None:
    prefix = CachedPrefix(module := frozen().to(dtype), tmp_path)
    x = images().to(dtype)
    prefix(x)
    prefix(x)
    before = module[0].weight.clone()
    with contextlib.suppress(TypeError):  # NumPy knows no bfloat16
        change(module[0].weight)
    if torch.equal(module[0].weight, before):  # bfloat16 does not see 1e-6
        return
    with pytest.raises(ModuleError, match="of other weights, by their checksum"):
        prefix(x)


def test_other_versions_and_dtypes_are_refused(tmp_path: Path) -> None:
    x = images()
    half = CachedPrefix(frozen(), tmp_path, dtype=torch.bfloat16)
    assert torch.equal(half(x), frozen()(x).bfloat16())
    assert torch.equal(half(x), frozen()(x).bfloat16())
    with pytest.raises(ModuleError, match="of other dtype"):
        CachedPrefix(frozen(), tmp_path)(x)
    path = tmp_path / "prefix.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"PyTorch": "1.0"}))
    with pytest.raises(ModuleError, match="of other PyTorch"):
        CachedPrefix(frozen(), tmp_path, dtype=torch.bfloat16)(x)
    with pytest.raises(ModuleError, match="no dtype of floats"):
        CachedPrefix(frozen(), tmp_path, dtype=torch.int8)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    x = images()
    CachedPrefix(frozen(), tmp_path)(x)
    (path,) = tmp_path.glob("*.safetensors")
    whole = bytearray(path.read_bytes())
    whole[-5] ^= 1  # one bit of the last output
    path.write_bytes(whole)
    prefix = CachedPrefix(frozen(), tmp_path)
    with pytest.raises(DataError, match=f"{path.name} is damaged"):
        prefix(x)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=f"^[^ ]*{path.name} is damaged: .*Delete this file$"):
        CachedPrefix(frozen(), tmp_path)(x)
    path.unlink()
    with pytest.raises(DataError, match="is damaged"):
        prefix(x)
    assert torch.equal(CachedPrefix(frozen(), tmp_path)(x), frozen()(x))
    for text in ("{", "[1]", "7"):
        (tmp_path / "prefix.json").write_text(text)
        with pytest.raises(DataError, match=r"prefix\.json is damaged"):
            CachedPrefix(frozen(), tmp_path)(x)


class Configured(nn.Module):
    """A module that reads attributes of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(1)  # no buffer
        self.act = lambda x: x.relu()
        self.config = SimpleNamespace(eps=0.1, layers=[{"shift": torch.zeros(1)}])
        self.power = functools.partial(torch.pow, exponent=2)
        self.table = np.ones(1)
        self.rest = [nn.Linear(1, 1)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(x) * self.scale + self.config.eps + self.config.layers[0]["shift"]
        return self.power(x) * float(self.table[0]) + self.rest[0].weight.sum()


def configured() -> Configured:
    torch.manual_seed(0)
    return Configured().eval()


def steep(by: float):
    return lambda module, args, out: out * by


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.scale.add_(1),
        lambda module: setattr(module, "scale", torch.full((1,), 2.0)),
        lambda module: setattr(module, "act", torch.tanh),
        lambda module: setattr(module, "act", lambda x: x.tanh()),
        lambda module: setattr(module.config, "eps", 0.2),
        lambda module: module.config.layers[0]["shift"].add_(1),
        lambda module: module.power.keywords.update(exponent=3),
        lambda module: module.table.fill(2),
        lambda module: module.rest[0].weight.data.copy_(torch.ones(1, 1)),
        lambda module: module.register_forward_hook(steep(2.0)),
        lambda module: module.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    ],
)
def test_settings_of_every_kind_are_refused_by_checksum(tmp_path: Path, change) -> None:
    x = images()
    CachedPrefix(configured(), tmp_path)(x)
    same = CachedPrefix(configured(), tmp_path)
    assert torch.equal(same(x), configured()(x))
    assert same.misses == 0
    change(other := configured())
    assert not torch.equal(other(x), configured()(x))
    with pytest.raises(ModuleError, match="of other settings, by their checksum"):
        CachedPrefix(other, tmp_path)(x)


def test_hooks_that_close_over_other_values_are_refused(tmp_path: Path) -> None:
    x, one, two = images(), frozen(), frozen()
    one.register_forward_hook(steep(2.0))
    two.register_forward_hook(steep(3.0))
    CachedPrefix(one, tmp_path)(x)
    with pytest.raises(ModuleError, match="of other settings"):
        CachedPrefix(two, tmp_path)(x)
    found: list[Tensor] = []
    three = frozen()
    three[0].register_forward_hook(lambda module, args, out: found.append(out))
    with pytest.raises(ModuleError, match="changes an attribute of '0' in it, or what a hook"):
        CachedPrefix(three, tmp_path / "three")(x)


@pytest.mark.parametrize(
    "register",
    [
        lambda: nn.modules.module.register_module_forward_hook(steep(2.0)),
        lambda: nn.modules.module.register_module_forward_pre_hook(
            lambda module, args: (args[0] + 1,) if isinstance(module, nn.Conv2d) else None
        ),
    ],
)
def test_hooks_of_all_modules_are_settings(tmp_path: Path, register) -> None:
    """They had no effect on stored outputs."""
    x, prefix = images(), CachedPrefix(frozen(), tmp_path / "without")
    assert torch.equal(prefix(x), frozen()(x))
    hook = register()
    try:
        for cached in (prefix, CachedPrefix(frozen(), tmp_path / "without")):
            with pytest.raises(ModuleError, match="of other settings, by their checksum"):
                cached(x)
        assert CachedPrefix(frozen(), tmp_path / "with").module(x).shape == prefix.module(x).shape
        CachedPrefix(frozen(), tmp_path / "with")(x)
        CachedPrefix(frozen(), tmp_path / "with")(x)
    finally:
        hook.remove()
    assert torch.equal(prefix(x), frozen()(x))


def test_folders_that_cannot_be_used_are_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file cannot hold outputs .*give a folder that can be"):
        CachedPrefix(frozen(), tmp_path / "file")(images())
    (tmp_path / "folder" / "prefix.json").mkdir(parents=True)
    with pytest.raises(DataError, match="folder cannot hold outputs"):
        CachedPrefix(frozen(), tmp_path / "folder")(images())
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere" / "else")
    (tmp_path / "nowhere").write_text("")
    with pytest.raises(DataError, match="gone cannot hold outputs"):
        CachedPrefix(frozen(), tmp_path / "gone")(images())


class Odd(nn.Module):
    """A module whose output is not a function of one sample alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> object:
        if self.kind == "random":
            return x + torch.randn_like(x)
        if self.kind == "buffer":
            self.seen += 1
        if self.kind == "mixes":
            return x - x.mean(0)
        if self.kind == "tuple":
            return x, x
        return x.sum() if self.kind == "scalar" else x


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("random", "draws random numbers"),
        ("buffer", "changes a buffer"),
        ("mixes", "depends on the other samples"),
        ("tuple", "returns tuple"),
        ("scalar", r"returns \(\)"),
    ],
)
def test_what_could_return_something_else_is_refused(tmp_path: Path, kind: str, why: str) -> None:
    prefix = CachedPrefix(Odd(kind).eval(), tmp_path)
    with pytest.raises(ModuleError, match=f"Odd cannot be a cached prefix: .*{why}"):
        prefix(images())
    assert not [*tmp_path.glob("*.safetensors")]


def test_what_trains_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModuleError, match=r"'0\.weight' is trained; call requires_grad_"):
        CachedPrefix(frozen().requires_grad_(True), tmp_path)
    with pytest.raises(ModuleError, match=r"it is in train mode; call eval\(\)"):
        CachedPrefix(frozen().train(), tmp_path)
    prefix = CachedPrefix(module := frozen(), tmp_path)
    module[3].train()  # the dropout alone
    with pytest.raises(ModuleError, match="'3' in it is in train mode"):
        prefix(images())
    prefix = CachedPrefix(frozen(), tmp_path)
    with pytest.raises(ModuleError, match="its input needs a gradient"):
        prefix(images().requires_grad_())
    with pytest.raises(ModuleError, match=r"something else than tensors \[N, ...\]"):
        prefix("images")
    assert len(prefix(images(0))) == 0


def test_a_folder_that_is_full_takes_no_more(tmp_path, caplog) -> None:
    x, plain = images(8), frozen()(images(8))
    prefix = CachedPrefix(frozen(), tmp_path, limit=5000)  # 576 bytes a sample, and a header
    for _ in range(2):
        assert torch.equal(prefix(x[:4]), plain[:4])
        torch.testing.assert_close(prefix(x[4:]), plain[4:])
    assert (prefix.hits, prefix.misses) == (4, 12)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) <= 5000
    assert caplog.text.count("is full") == 1


def test_it_breaks_a_compiled_graph(tmp_path: Path) -> None:
    prefix = CachedPrefix(frozen(), tmp_path)
    model = nn.Sequential(prefix, nn.Flatten(), nn.Linear(144, 2))
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(images()), model(images()))
    assert prefix.misses == 6


def test_files_of_another_module_are_never_read(tmp_path: Path) -> None:
    """Two processes that began at once had both found no `prefix.json`, and read each other's."""
    x, mine, other = images(), CachedPrefix(frozen(), tmp_path), CachedPrefix(frozen(5), tmp_path)
    mine(x)
    (tmp_path / "prefix.json").unlink()
    with pytest.raises(ModuleError, match="of another module"):
        other(x)
    (tmp_path / "prefix.json").unlink()
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert torch.equal(other(x), frozen(5)(x))
    assert torch.equal(mine(images(seed=2)), frozen()(images(seed=2)))
    assert torch.equal(other(images(seed=2)), frozen(5)(images(seed=2)))


def test_outputs_that_are_not_finite(tmp_path: Path) -> None:
    x, features = images(), nn.Sequential(nn.Flatten(), nn.ReLU()).eval()
    x[1, 0, 0, 0], x[2, 0, 0, 0] = float("nan"), float("inf")
    assert torch.equal(CachedPrefix(features, tmp_path)(x).nan_to_num(), features(x).nan_to_num())
