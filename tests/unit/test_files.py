"""Files are replaced whole, and what is no file is written into."""

import os
from pathlib import Path

import pytest

from elbowroom.files import write_text


def test_a_file_is_replaced_and_folders_are_made(tmp_path):
    path = tmp_path / "new" / "page.html"
    for text in ("old", "new ✓"):
        write_text(text, path)
        assert path.read_text(encoding="utf-8") == text
    assert list(path.parent.iterdir()) == [path]


def test_what_cannot_be_replaced_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    write_text("old", path)

    def broken(*_):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", broken)
    with pytest.raises(OSError, match="no space"):
        write_text("new", path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "old"


def test_a_link_stays_a_link(tmp_path):
    path, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(path)
    for text in ("old", "new"):
        write_text(text, link)
        assert path.read_text() == text
    assert link.is_symlink()


def test_a_device_is_written_into_and_stays_one():
    reader, writer = os.openpty()
    path = Path(os.ttyname(writer))
    try:
        write_text("page", path)
        assert os.read(reader, 10) == b"page"
        assert path.is_char_device()
    finally:
        os.close(writer)
        os.close(reader)
