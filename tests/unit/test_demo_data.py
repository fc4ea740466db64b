"""The demo's images and text: what ships, what a user may bring, and how a bad file is named."""

import gzip
import struct

import pytest
import torch

from elbowroom.demo import data
from elbowroom.demo.data import load_images, load_text
from elbowroom.errors import DataError


def idx(values: torch.Tensor) -> bytes:
    sizes = struct.pack(f">{values.dim()}I", *values.shape)
    return bytes([0, 0, 8, values.dim()]) + sizes + values.numpy().tobytes()


@pytest.fixture
def folder(tmp_path):
    """A tiny set in the original format: two files gzipped, two plain."""
    generator = torch.Generator().manual_seed(0)
    for name, count in (("train", 20), ("t10k", 10)):
        images = torch.randint(0, 256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        labels = (torch.arange(count) % 10).to(torch.uint8)
        (tmp_path / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels))
    return tmp_path


def test_the_package_ships_a_balanced_set_under_six_megabytes():
    images = load_images()
    assert (len(images.train), len(images.test)) == (12_000, 3_000)
    assert images.train.labels.bincount().tolist() == [1200] * 10
    assert images.test.labels.bincount().tolist() == [300] * 10
    assert images.train.images.shape == (12_000, 28, 28)
    assert data.PACKED.stat().st_size < 6_000_000
    assert "MIT License" in (data.PACKED.parent / "LICENSE.fashion-mnist").read_text()


def test_pixels_are_normalized():
    pixels = load_images().train.pixels(slice(0, 2000))
    assert pixels.shape == (2000, 1, 28, 28)
    assert abs(float(pixels.mean())) < 0.05
    assert abs(float(pixels.std()) - 1) < 0.05


def test_no_test_image_is_trained_on():
    images = load_images()
    train = {bytes(image.numpy()) for image in images.train.images}
    shared = sum(bytes(image.numpy()) in train for image in images.test.images)
    assert shared == 0


def test_idx_files_plain_and_gzipped(folder):
    images = load_images(folder)
    assert (len(images.train), len(images.test)) == (20, 10)
    assert images.test.labels.tolist() == list(range(10))
    assert images.origin.endswith(f"images from {folder.name}")


def test_a_missing_folder(tmp_path):
    with pytest.raises(DataError, match=r"no folder .*nowhere; expected one that holds"):
        load_images(tmp_path / "nowhere")


def test_a_missing_file_says_what_is_there(folder):
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(
        DataError, match=r"no t10k-labels-idx1-ubyte or .*\.gz in .*; found t10k-im"
    ):
        load_images(folder)


def test_a_truncated_file_says_both_sizes(folder):
    path = folder / "train-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(
        DataError, match=r"train-labels.* 20 bytes of values; found 17\. Is it trunc"
    ):
        load_images(folder)


def test_a_truncated_gzip(folder):
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(
        DataError, match=r"cannot read .*train-images-idx3-ubyte\.gz: .*expected an IDX"
    ):
        load_images(folder)


def test_a_file_that_ends_inside_its_header(folder):
    (folder / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03\0\0\0\x01\0")
    with pytest.raises(DataError, match="ends inside its header: expected 16 bytes of it, found 9"):
        load_images(folder)


@pytest.mark.parametrize(
    "content", [b"", b"\0\0", b"<html>not found</html>", b"\0\0\x0d\x01\0\0\0\x01"]
)
def test_not_an_idx_file(folder, content):
    (folder / "train-labels-idx1-ubyte").write_bytes(content)
    with pytest.raises(
        DataError, match=r"no IDX file of uint8 in 1 dimensions: expected .*00 00 08 01"
    ):
        load_images(folder)


def test_images_and_labels_that_do_not_belong_together(folder):
    (folder / "train-labels-idx1-ubyte").write_bytes(idx(torch.zeros(7, dtype=torch.uint8)))
    with pytest.raises(DataError, match=r"as many 28x28 images as labels; found .* and 7 labels"):
        load_images(folder)


def test_a_label_that_is_no_class(folder):
    (folder / "train-labels-idx1-ubyte").write_bytes(idx(torch.full((20,), 10, dtype=torch.uint8)))
    with pytest.raises(DataError, match="classes 0 to 9; found 10"):
        load_images(folder)


@pytest.mark.parametrize("damage", ["missing", "cut", "altered"])
def test_a_damaged_package_names_its_file_and_the_way_out(monkeypatch, tmp_path, damage):
    path = tmp_path / "fashion-mnist.xz"
    content = bytearray(data.PACKED.read_bytes())
    if damage == "altered":
        content[len(content) // 2] ^= 0x10
    if damage != "missing":
        path.write_bytes(content[: 10_000 if damage == "cut" else None])
    monkeypatch.setattr(data, "PACKED", path)
    with pytest.raises(DataError, match=r"cannot read .*fashion-mnist\.xz.*reinstall"):
        load_images()


def test_text_is_the_same_every_time_and_without_site_packages():
    first, second = load_text(limit_nbytes=300_000), load_text(limit_nbytes=300_000)
    assert torch.equal(first.train, second.train)
    assert len(first.train) + len(first.test) == 300_000
    assert len(first.test) == 15_000
    assert "300,000 bytes" in first.origin


def test_text_skips_tests_and_installed_packages(tmp_path):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "test").mkdir()
    (tmp_path / "b.py").write_text("b" * 150_000)
    (tmp_path / "a.py").write_text("a" * 150_000)
    (tmp_path / "site-packages" / "c.py").write_text("c" * 150_000)
    (tmp_path / "test" / "d.py").write_text("d" * 150_000)
    text = load_text(tmp_path)
    tokens = torch.cat([text.train, text.test])
    assert sorted(set(tokens.tolist())) == [0, ord("a"), ord("b")]
    assert tokens[0] == ord("a")


def test_too_little_text(tmp_path):
    (tmp_path / "a.py").write_text("pass\n")
    with pytest.raises(DataError, match=r"found 6 bytes of \*\.py .*; the demo needs 200,000"):
        load_text(tmp_path)
