"""Files are replaced whole, and what is no file is written into."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import elbowroom as er
from elbowroom.files import replacing, write_text


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


# --- checkpoints ---


def test_a_checkpoint_is_what_torch_loads(tmp_path):
    path = tmp_path / "new" / "last.pt"
    net = torch.nn.Linear(64, 64)
    optimizer = er.optim.AdamW(net.parameters())
    net(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    for step in (1, 2):
        er.save_checkpoint({"step": step, "optimizer": optimizer.state_dict()}, path)
    found = torch.load(path, weights_only=True)
    assert found["step"] == 2
    er.optim.AdamW(net.parameters()).load_state_dict(found["optimizer"])
    assert list(path.parent.iterdir()) == [path]


class Bad:
    def __reduce__(self):
        raise ValueError("cannot be pickled")


def test_who_may_read_a_file_stays(tmp_path):
    path = tmp_path / "last.pt"
    er.save_checkpoint(1, path)
    path.chmod(0o600)
    er.save_checkpoint(2, path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert torch.load(path) == 2


def stopped_halfway(path):
    with replacing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt


def test_an_error_in_the_middle_leaves_the_old_checkpoint_and_nothing_beside_it(tmp_path):
    path = tmp_path / "last.pt"
    er.save_checkpoint(torch.arange(3), path)
    with pytest.raises(ValueError, match="cannot be pickled"):
        er.save_checkpoint({"weights": torch.ones(1000), "bad": Bad()}, path)
    with pytest.raises(KeyboardInterrupt):
        stopped_halfway(path)
    assert torch.equal(torch.load(path), torch.arange(3))
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_are_on_the_disk_before_they_get_the_name(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, Path.replace

    def synced(number):
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{number}") else "file")
        fsync(number)

    def renamed(self, target):
        done.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    for write in (lambda path: write_text("text", path), lambda path: er.save_checkpoint(1, path)):
        write(tmp_path / "file")
        assert done == ["file", "replace", "folder"]
        done.clear()


def test_a_process_that_is_killed_while_it_writes_leaves_a_whole_checkpoint(tmp_path):
    path = tmp_path / "last.pt"
    er.save_checkpoint({"step": 0, "weights": torch.zeros(1 << 20)}, path)
    endless = f"""
        import itertools, torch
        from elbowroom.files import save_checkpoint
        for step in itertools.count(1):
            weights = torch.full((1 << 22,), float(step))
            save_checkpoint({{"step": step, "weights": weights}}, {str(path)!r})
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(endless)])
    try:
        until = time.monotonic() + 120
        while not _writing(tmp_path) and time.monotonic() < until:
            time.sleep(0.001)
    finally:
        child.kill()
    assert child.wait() == -signal.SIGKILL
    found = torch.load(path)
    assert torch.equal(found["weights"], torch.full_like(found["weights"], found["step"]))


def _writing(folder):
    try:
        return any(part.stat().st_size for part in folder.glob(".last.pt.*.part"))
    except FileNotFoundError:  # it has its name already
        return False
