"""Bytes of earlier versions decode as they did then: files are added (make.py), never rewritten."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from elbowroom.codecs import Encoded, codecs

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("golden_make", HERE / "make.py")
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)

FILES = sorted(HERE.glob("*.safetensors"))
GOLDEN = pytest.mark.parametrize(
    "path", FILES, ids=lambda path: path.name.removesuffix(".safetensors")
)


def load(path: Path, device: str = "cpu") -> tuple[Encoded, torch.Tensor]:
    with safe_open(path, "pt", device=device) as file:
        told = json.loads(file.metadata()["encoded"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    return make.read(told, tensors), tensors["decoded"]


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype is y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_no_golden_file_has_changed():
    listed = dict(reversed(line.split("  ")) for line in make.SUMS.read_text().splitlines())
    assert {path.name: make.sha256(path) for path in FILES} == listed


def test_every_registered_codec_has_a_golden_file():
    assert {load(path)[0].codec.id for path in FILES} == set(codecs())


def test_making_again_adds_and_changes_nothing(capsys):
    before = make.SUMS.read_bytes()
    make.main()
    assert capsys.readouterr().out == ""
    assert make.SUMS.read_bytes() == before


@GOLDEN
def test_the_reference_decodes_the_same_bits(path):
    encoded, decoded = load(path)
    with make.on_reference():
        assert same_bits(make.flat(encoded.decode()), decoded)


@GOLDEN
def test_the_kernels_decode_the_same_values(path):
    encoded, decoded = load(path)
    close(encoded, decoded)


@GOLDEN
@pytest.mark.gpu
def test_the_gpu_decodes_the_same_values(path):
    encoded, decoded = load(path, "cuda")
    close(encoded, decoded)


def close(encoded: Encoded, decoded: torch.Tensor) -> None:
    y = encoded.decode()
    assert (tuple(y.shape), y.stride()) == (encoded.shape, encoded.stride)
    if encoded.codec.lossless or encoded.raw:
        assert same_bits(make.flat(y), decoded)
        return
    # A kernel may fuse a multiplication and an addition: a rounding less, of at most the largest.
    largest = float(decoded.abs().max())
    rounding = {torch.float32: 2**-22, torch.bfloat16: 2**-7, torch.float16: 2**-10}[decoded.dtype]
    assert float((make.flat(y).double() - decoded.double()).abs().max()) <= largest * rounding
    if encoded.facts.has_zeros:
        assert torch.equal(make.flat(y) != 0, decoded != 0)


@GOLDEN
def test_the_size_is_still_the_predicted_one(path):
    encoded, _ = load(path)
    told = encoded.codec.encoded_nbytes(encoded.shape, encoded.dtype, encoded.facts)
    fixed = encoded.codec.fixed_size(encoded.facts)
    assert encoded.raw or (encoded.nbytes == told if fixed else encoded.nbytes <= told)
