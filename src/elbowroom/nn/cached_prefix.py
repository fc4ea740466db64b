"""A frozen part of a network whose outputs are computed once, and later read from a folder.

    sample x_n --checksum--> key --in the folder?--> y_n, or else y_n = module(x_n), which is stored

    folder/prefix.json            checksums of what outputs depend on, besides the input
    folder/<name>.safetensors     outputs by key, and their checksums: those of one forward

A part that is not trained (lower layers under a new head, an encoder beside a trained network)
gives the same outputs in every epoch. The key of a sample is a checksum (BLAKE2, 16 bytes) of its
bytes, dtype, shape and kind of device, and of autocast. So batches may be shuffled, and a sample
that has changed is computed anew. Where `prefix.json` names other weights, code, settings or
another PyTorch, the folder is refused, and so is an output whose own checksum is wrong.

Settings are attributes, with tensors, functions and the fields of objects, and forward hooks
(`_described.py`). A change of weights through `.data` or NumPy has no version, so every forward
reads the weights once, and compares sums of their bytes. Not seen are changes of functions that the
classes of the modules call, and of attributes whose names begin with an underscore. An output has
the rounding of the batch in which its sample was first seen. The keys and outputs of a GPU's
samples pass through host memory.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from math import sqrt
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from elbowroom.codecs.base import memory_order
from elbowroom.errors import DataError, ModuleError
from elbowroom.files import bytes_of, replacing, write_text
from elbowroom.kernels.fakes import has_values
from elbowroom.nn._described import described, source_of
from elbowroom.units import parse_nbytes, show_nbytes

_MANIFEST = "prefix.json"
_OWNER = "prefix"  # in the metadata of a file
_SUMS = 256  # of parts of a weight: one would not tell that two rows were exchanged
_log = logging.getLogger("elbowroom")


class CachedPrefix(nn.Module):
    """Module that reads the outputs of a frozen module from a folder, and computes new ones.

        features = model.features.eval().requires_grad_(False)
        model.features = er.nn.CachedPrefix(features, "cache/")

    module  a module in eval mode whose parameters need no gradients. It takes tensors [N, ...],
            returns one tensor [N, ...], and the N samples do not depend on each other
    folder  a folder for the outputs of this module alone. It is created at the first forward
    limit   bytes that it may take, such as "10 GiB"; outputs beyond are computed each time
    dtype   in which outputs of floats are stored and returned, such as torch.bfloat16; None: theirs

    `train()` leaves the module in eval mode. `hits` and `misses` count samples.

    Raises ModuleError if the module could return something else another time: if it trains, draws
    random numbers, changes its buffers or mixes samples, or if the folder belongs to other weights
    or code; and DataError if a file is damaged.
    """

    def __init__(
        self,
        module: nn.Module,
        folder: str | Path,
        *,
        limit: float | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dtype is not None and not dtype.is_floating_point:
            raise ModuleError(f"dtype={dtype} is no dtype of floats; leave it out, or give one")
        self.module, self.folder, self.dtype = module, Path(folder), dtype
        self.limit_nbytes = None if limit is None else parse_nbytes(limit)
        self.hits = self.misses = 0
        self._files: dict[str, Path] = {}  # by key
        self._nbytes = 0  # of all files
        self._seen: object = None  # versions of the state that the folder belongs to
        self._sums: list[Tensor] = []  # of its bytes
        self._owner = ""  # a checksum of that state, which each file bears
        self._is_apart = self._is_full = False  # samples do not depend on each other; no room left
        self._check_frozen()
        self.training = False

    def train(self, mode: bool = True) -> "CachedPrefix":
        """Changes nothing, so that model.train() leaves the module in eval mode."""
        return self

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns what module(*inputs) does, [N, ...], without a gradient."""
        if torch.compiler.is_compiling():  # files are read between two graphs
            output: Callable[..., Tensor] = torch.compiler.disable(self._output)  # type: ignore[no-untyped-call]
            return output(*inputs)
        return self._output(*inputs)

    def _output(self, *inputs: Tensor) -> Tensor:
        self._check_inputs(inputs)
        self._check_frozen()
        with torch.no_grad():
            if not len(inputs[0]) or not all(map(has_values, inputs)):  # the latter in a rehearsal
                return self._run(inputs)
            with self._files_in_use():
                self._check_folder()
            keys = _keys(inputs)
            new = {key: n for n, key in enumerate(keys) if key not in self._files}
            found = self._read([key for key in keys if key in self._files])
            if new:
                rows = torch.tensor([*new.values()], device=inputs[0].device)
                computed = self._computed([x[rows] for x in inputs])
                fresh = dict(zip(new, computed.cpu().contiguous(), strict=True))
                with self._files_in_use():
                    self._store(fresh)
                found |= fresh
            missed = sum(key in new for key in keys)
            self.hits, self.misses = self.hits + len(keys) - missed, self.misses + missed
            return torch.stack([found[key] for key in keys]).to(inputs[0].device)

    def _run(self, inputs: Sequence[Tensor]) -> Tensor:
        y: Tensor = self.module(*inputs)
        if not isinstance(y, Tensor) or y.dim() == 0 or len(y) != len(inputs[0]):
            shown = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            self._refuse(f"it returns {shown}, and not one tensor with a row for each sample")
        return y.to(self.dtype) if self.dtype is not None and y.is_floating_point() else y

    def _computed(self, inputs: Sequence[Tensor]) -> Tensor:
        """Returns new outputs. Raises ModuleError where they could be others another time."""
        buffers, random = _versions(self.module.named_buffers()), _random(inputs[0].device)
        settings = _settings(self.module)
        y = self._run(inputs)
        if not torch.equal(random, _random(inputs[0].device)):
            self._refuse("its forward draws random numbers")
        if buffers != _versions(self.module.named_buffers()):
            self._refuse("its forward changes a buffer")
        for name, now in _settings(self.module).items():
            if now != settings.get(name):
                which = f"'{name}' in it" if name else "it"
                self._refuse(
                    f"its forward changes an attribute of {which}, or what a hook there holds; if "
                    "its first call alone does so, call it once before"
                )
        if not self._is_apart and len(y) > 1 and y.is_floating_point():
            alone = self._run([x[:1] for x in inputs])[0].float()
            whole = y.abs()[y.isfinite()].max().item() if y.isfinite().any() else 0.0
            within = sqrt(torch.finfo(y.dtype).eps) * whole
            if not torch.allclose(alone, y[0].float(), rtol=0, atol=within, equal_nan=True):
                self._refuse("its output of a sample depends on the other samples of the batch")
            self._is_apart = True
        return y

    @contextmanager
    def _files_in_use(self) -> Iterator[None]:
        try:
            yield
        except DataError:  # an OSError, too, which says what is damaged
            raise
        except OSError as error:
            raise DataError(
                f"{self.folder} cannot hold outputs ({error}); give a folder that can be written to"
            ) from error

    def _check_inputs(self, inputs: Sequence[Tensor]) -> None:
        if not inputs or not all(isinstance(x, Tensor) and x.dim() for x in inputs):
            self._refuse("it is called with something else than tensors [N, ...]")
        if len({(len(x), x.device) for x in inputs}) > 1:
            self._refuse("its inputs have different numbers of rows, or devices")
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            self._refuse("its input needs a gradient; detach() it, or freeze what comes before")

    def _check_frozen(self) -> None:
        trained = next((n for n, p in self.module.named_parameters() if p.requires_grad), None)
        if trained is not None:
            self._refuse(f"its parameter '{trained}' is trained; call requires_grad_(False) on it")
        training = next((n for n, m in self.module.named_modules() if m.training), None)
        if training is not None:
            which = f"'{training}' in it" if training else "it"
            self._refuse(f"{which} is in train mode; call eval() on it")

    def _refuse(self, why: str) -> None:
        raise ModuleError(f"{type(self.module).__name__} cannot be a cached prefix: {why}.")

    def _check_folder(self) -> None:
        """Raises ModuleError unless the folder belongs to this state of the module."""
        named = [*_state(self.module)]
        state, sums = (_versions(named), _settings(self.module)), _sums(x for _, x in named)
        if state == self._seen and _are_equal(sums, self._sums):
            return
        depends = self._depends()
        path = self.folder / _MANIFEST
        if path.exists():
            try:
                known = dict(json.loads(path.read_text()))
            except (ValueError, TypeError) as error:
                raise DataError(f"{path} is damaged ({error}); delete {self.folder}") from error
            other = [name for name in depends if known.get(name) != depends[name]]
            if other:
                self._refuse(
                    f"the outputs in {self.folder} are of other {' and '.join(other)}, by their "
                    "checksum; give another folder, or delete this one"
                )
        else:
            write_text(json.dumps(depends), path)
        self._owner = _digest(f"{name} {value}" for name, value in depends.items())
        self._files = {}
        for key, file, owner in _stored(self.folder):
            if owner != self._owner:
                self._refuse(
                    f"{file} holds outputs of another module, by its checksum; give another "
                    "folder, or delete this one"
                )
            self._files[key] = file
        self._nbytes = sum(file.stat().st_size for file in {*self._files.values()})
        self._seen, self._sums = state, sums

    def _depends(self) -> dict[str, str]:
        """Returns checksums of all that outputs depend on, besides the input."""
        settings = [(name, part) for name, parts in described(self.module) for part in parts]
        for name, x in [*_state(self.module), *settings]:
            if isinstance(x, Tensor) and not _has_bytes(x):
                self._refuse(f"'{name}' has a {type(x).__name__} whose bytes are not known")
        weights = _digest(
            part for name, x in _state(self.module) for part in (f"{name} {_kind(x)}", x)
        )
        classes = {c for m in self.module.modules() for c in type(m).__mro__ if c is not nn.Module}
        code = _digest(sorted(map(source_of, classes)))
        return {
            "weights": weights,
            "code": code,
            "settings": _digest(part for one in settings for part in one),
            "PyTorch": torch.__version__,
            "dtype": str(self.dtype),
        }

    def _store(self, outputs: Mapping[str, Tensor]) -> None:
        more = sum(y.nbytes for y in outputs.values())
        if self.limit_nbytes is not None and self._nbytes + more > self.limit_nbytes:
            if not self._is_full:
                limit = show_nbytes(self.limit_nbytes)
                _log.warning("%s is full (limit=%s); the rest is computed", self.folder, limit)
            self._is_full = True
            return
        # Another module that writes into this folder at the same time has files of its own.
        path = self.folder / f"{_digest([self._owner, *outputs])}.safetensors"
        checksums = {key: _digest([_kind(y), y]) for key, y in outputs.items()}
        with replacing(path) as file:
            file.write(save(dict(outputs), {**checksums, _OWNER: self._owner}))
        self._nbytes += path.stat().st_size
        self._files |= dict.fromkeys(outputs, path)

    def _read(self, keys: Sequence[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for path in dict.fromkeys(self._files[key] for key in keys):
            try:
                with safe_open(path, framework="pt") as file:
                    checksums = file.metadata() or {}
                    mine = {key: file.get_tensor(key) for key in keys if self._files[key] == path}
            except (SafetensorError, OSError) as error:
                raise _damaged(path) from error
            wrong = any(checksums.get(key) != _digest([_kind(y), y]) for key, y in mine.items())
            if wrong or checksums.get(_OWNER) != self._owner:
                raise _damaged(path)
            found |= mine
        return found


def _stored(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Yields each key with its file, and whose outputs that file says to hold."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                owner = (file.metadata() or {}).get(_OWNER, "")
                yield from ((key, path, owner) for key in file.keys())  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise _damaged(path) from error


def _damaged(path: Path) -> DataError:
    return DataError(f"{path} is damaged: an output is not what was stored. Delete this file")


def _keys(inputs: Sequence[Tensor]) -> list[str]:
    """Returns a checksum for each sample of these tensors [N, ...]."""
    kind = inputs[0].device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    held = [x.detach().cpu().contiguous() for x in inputs]
    rows = zip(*held, strict=True)
    return [_digest([f"{kind} {cast}", *(p for x in row for p in (_kind(x), x))]) for row in rows]


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _settings(module: nn.Module) -> dict[str, object]:
    """Returns what describes each module, with tensors by their versions."""
    return {
        name: [part if isinstance(part, str) else _versions([("", part)]) for part in parts]
        for name, parts in described(module)
    }


def _has_bytes(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_meta


def _versions(named: Iterable[tuple[str, Tensor]]) -> tuple[object, ...]:
    return tuple((name, x.data_ptr(), x._version, _kind(x)) for name, x in named)


def _sums(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns sums of the bytes of each tensor, eight of them taken as one number."""
    found = []
    for x in filter(_has_bytes, tensors):
        flat = memory_order(x.detach())[0].contiguous().view(torch.uint8)
        whole = len(flat) - len(flat) % 8
        words = flat[:whole] if flat.storage_offset() % 8 else flat[:whole].view(torch.int64)
        parts = max(min(_SUMS, len(words)), 1)
        each = len(words) // parts
        sums = words[: parts * each].view(parts, each).sum(1, dtype=torch.int64)
        rest = words[parts * each :].sum(), flat[whole:].sum()
        found.append(torch.cat([sums, torch.stack(rest)]))
    return [one.cpu() for one in found]


def _are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _random(device: torch.device) -> Tensor:
    """The states of PyTorch's generators that a forward on this device may draw from."""
    if device.type != "cuda":
        return torch.get_rng_state()
    return torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state(device)])


def _kind(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def _digest(parts: Iterable[str | Tensor]) -> str:
    """Returns a checksum of texts and of the bytes of tensors."""
    found = blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, str):
            found.update(f"{len(part)} {part}".encode())
        elif part.numel():
            flat = part.detach().cpu().contiguous().view(-1).view(torch.uint8)
            found.update(bytes_of(flat))
    return found.hexdigest()
