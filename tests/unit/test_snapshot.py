"""PyTorch's memory snapshots: read safely, told as facts, and drawn."""

import os
import pickle
import tracemalloc
from collections import OrderedDict
from contextlib import suppress

import pytest

import elbowroom as er
from elbowroom.errors import BudgetTooSmall, DataError, PlanError
from elbowroom.measure.snapshot import BACKWARD, BEFORE, ELSE, OPTIMIZER, SAVED, _snapshot
from elbowroom.report import render_profile, snapshot_page

MIB = 2**20
TORCH = "/venv/lib/python3.11/site-packages/torch"
FORWARD = [
    {"filename": f"{TORCH}/nn/modules/linear.py", "line": 134, "name": "forward"},
    {"filename": "/home/me/model.py", "line": 12, "name": "forward"},
    {"filename": "/home/me/train.py", "line": 40, "name": "<module>"},
]
STEP = [
    {"filename": f"{TORCH}/optim/rules.py", "line": 100, "name": "_init_group"},
    {"filename": "/home/me/train.py", "line": 42, "name": "<module>"},
]
CALLS_BACKWARD = [  # a gradient that is freed on the main thread
    {"filename": f"{TORCH}/autograd/graph.py", "line": 1, "name": "_engine_run_backward"},
    {"filename": "/home/me/train.py", "line": 41, "name": "<module>"},
]


class Trace:
    """What the allocator of one GPU writes, in the documented format."""

    def __init__(self, repeats_stacks=False):
        self.events, self.held, self.next = [], {}, 0x7F0000000000
        self.repeats_stacks = repeats_stacks

    def alloc(self, mib, frames, *, recorded=True):
        address, self.next = self.next, self.next + mib * MIB
        self.held[address] = mib * MIB, frames
        if recorded:
            self._add("alloc", address, frames)
        return address

    def free(self, address, frames):
        _, made = self.held[address]
        for action in ("free_requested", "free_completed"):
            self._add(action, address, made if self.repeats_stacks else frames)
        del self.held[address]

    def _add(self, action, address, frames):
        self.events.append(
            {
                "action": action,
                "addr": address,
                "size": self.held[address][0],
                "stream": 0,
                "time_us": 1_000_000 + 1000 * len(self.events),
                "frames": frames,
            }
        )

    def data(self):
        blocks = [
            {
                "size": size,
                "requested_size": size,
                "address": address,
                "state": "active_allocated",
                "frames": frames,
            }
            for address, (size, frames) in self.held.items()
        ]
        blocks.append({"size": 5 * MIB, "address": 1, "state": "inactive", "frames": []})
        total = sum(block["size"] for block in blocks)
        segment = {"device": 0, "address": 0, "total_size": total, "stream": 0, "blocks": blocks}
        marks = [{"action": "snapshot", "addr": 0, "size": 0, "frames": []}]
        return {"segments": [segment], "device_traces": [self.events + marks, []]}


def training(**settings):
    """Two steps: 100 MiB before, 3 x 50 saved, gradients of 20 each, states of 40 once."""
    trace = Trace(**settings)
    trace.alloc(100, [], recorded=False)
    states = []
    for _ in range(2):
        saved = [trace.alloc(50, FORWARD) for _ in range(3)]
        gradients = []
        for one in reversed(saved):
            gradients.append(trace.alloc(20, []))  # autograd's thread has no frame of Python
            trace.free(one, [])
        if not states:
            states.append(trace.alloc(40, STEP))
        for one in gradients:
            trace.free(one, FORWARD[2:])
    return trace.data()


@pytest.fixture
def write(tmp_path):
    def write(data):
        path = tmp_path / "snapshot.pickle"
        path.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data))
        return path

    return write


@pytest.mark.parametrize("repeats_stacks", [False, True])
def test_the_peak_and_its_parts(write, repeats_stacks):
    found = er.load_snapshot(write(training(repeats_stacks=repeats_stacks)))
    assert found.peak == (100 + 150 + 20 + 40) * MIB  # the second step has states
    assert found.parts() == {
        SAVED: 150 * MIB,
        BEFORE: 100 * MIB,
        OPTIMIZER: 40 * MIB,
        BACKWARD: 20 * MIB,
    }
    assert found.level[0] == 100 * MIB
    assert found.level[-1] == 140 * MIB  # as the segments have it
    assert found.at_peak()[1].line == "model.py:12"
    assert "peak 310 MiB" in str(found)


def test_a_record_that_has_lost_its_beginning_comes_to_the_same_end(write):
    data = training()
    data["device_traces"][0] = data["device_traces"][0][9:]
    found = er.load_snapshot(write(data))
    assert found.level[-1] == 140 * MIB
    assert found.peak == 310 * MIB


def test_without_a_history_there_are_blocks_only(write):
    data = training()
    data["device_traces"] = []
    found = er.load_snapshot(write(data))
    assert found.level == (140 * MIB,)
    assert found.parts() == {BEFORE: 140 * MIB}


def test_without_stacks_nothing_is_guessed(write):
    data = training()
    for one in (*data["device_traces"][0], *data["segments"][0]["blocks"]):
        one["frames"] = []
    assert er.load_snapshot(write(data)).parts().keys() == {BEFORE, ELSE}


def test_the_gpu_that_held_most_is_shown(write):
    data = training()
    data["device_traces"].reverse()
    data["segments"][0]["device"] = 1
    assert er.load_snapshot(write(data)).device == 1
    with pytest.raises(DataError, match="nothing of GPU 5"):
        er.load_snapshot(write(data), device=5)


def test_a_plan_is_an_estimate(write):
    found = er.load_snapshot(write(training()))
    assert er.plan(found, budget="310 MiB").changes_nothing
    with pytest.raises(PlanError, match=r"110 MiB above the budget.*elbowroom profile") as caught:
        er.plan(found, budget="200 MiB")
    assert not isinstance(caught.value, BudgetTooSmall)
    with pytest.raises(BudgetTooSmall, match="without all tensors held for backward") as caught:
        er.plan(found, budget="150 MiB")
    assert caught.value.least_nbytes == 160 * MIB
    assert caught.value.parts[SAVED] == 150 * MIB


def test_the_page_has_the_peak_and_the_lines(write):
    data = training()
    data["device_traces"][0][0]["frames"] = [
        {"filename": "/home/me/<script>.py", "line": 1, "name": "<script>alert(1)</script>"}
    ]
    path = write(data)
    html = render_profile(snapshot_page(er.load_snapshot(path), path.name))
    assert "model.py:12" in html
    assert "<script>alert" not in html
    assert f'"peak": {310 * MIB}' in html


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("evil", [Runs(), {"segments": [Runs()]}, OrderedDict(segments=[])])
def test_code_in_the_file_does_not_run(write, evil, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="it wants to run"):
        er.load_snapshot(write(evil))
    assert not (tmp_path / "ran").exists()


def endless():
    """Ten lists of ten lists of ..., a few hundred bytes as a pickle and terabytes as text."""
    value = ["ha"]
    for _ in range(12):
        value = [value] * 10
    return value


def deep():
    value = []
    for _ in range(100_000):
        value = [value]
    return value


def first_of(data, action):
    return next(one for one in data["device_traces"][0] if one["action"].startswith(action))


@pytest.mark.parametrize("make", [endless, deep])
@pytest.mark.parametrize("place", ["action", "addr", "state", "filename"])
def test_lists_in_the_place_of_a_name_are_refused_at_once(make, place):
    data = training()
    if place == "state":
        data["segments"][0]["blocks"][0]["state"] = make()
    elif place == "filename":
        first_of(data, "alloc")["frames"] = [{"filename": make(), "line": 1, "name": "f"}]
    else:
        first_of(data, "alloc")[place] = make()
    with pytest.raises(ValueError, match="list should be a"):
        _snapshot(data, None)


def test_what_else_a_frame_has_is_not_compared():
    data = training()
    begin, end = first_of(data, "alloc"), first_of(data, "free")
    end["addr"] = begin["addr"]
    for event in (begin, end):
        event["frames"] = [{"filename": "a.py", "line": 1, "name": "f", "more": endless()}]
    assert _snapshot(data, None).peak > 0


def test_a_part_of_a_file_is_refused(write):
    whole = pickle.dumps(training())
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        with pytest.raises(DataError, match="truncated, or no memory snapshot"):
            er.load_snapshot(write(whole[:size]))


@pytest.mark.parametrize("change", range(200))
def test_broken_bytes_end_in_a_message_or_in_a_snapshot(write, change):
    whole = bytearray(pickle.dumps(training()))
    whole[(change * 7919) % len(whole)] ^= 1 << (change % 8)
    with suppress(DataError):  # and nothing else
        assert er.load_snapshot(write(bytes(whole))).peak >= 0


@pytest.mark.parametrize(
    "other",
    [
        [],
        {},
        {"segments": 3},
        {"segments": [{"total_size": "x", "blocks": []}]},
        {"segments": [{"total_size": 1, "device": 0, "blocks": [{"size": -1, "state": "active"}]}]},
        {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1}]]},
    ],
)
def test_other_pickles_are_refused(write, other):
    with pytest.raises(DataError, match="no memory snapshot"):
        er.load_snapshot(write(other))


def test_events_of_a_newer_torch_are_counted(write):
    data = training()
    data["device_traces"][0].insert(3, {"action": "teleport", "addr": 1, "size": 1, "frames": []})
    found = er.load_snapshot(write(data))
    assert found.unknown == {"teleport": 1}
    assert "events of unknown kinds: 1" in str(found)


def test_a_file_that_is_not_there_is_told_how_to_make(tmp_path):
    with pytest.raises(DataError, match="_record_memory_history"):
        er.load_snapshot(tmp_path / "none.pickle")


def put(number, length):
    return b"r" + number.to_bytes(length, "little")


# Few bytes each. Python's own unpickler takes 2 GiB for the first, and none has to be believed.
BOMBS = {
    "a place of the memo": b"\x80\x04N" + put(2**27, 4) + b".",
    "a place of the memo, as text": b"\x80\x04Np134217728\n.",
    "a place of the memo, after others": pickle.dumps(training(), 2)[:-1] + b"N" + put(2**26, 4),
    "a frame": b"\x80\x04\x95" + (2**31).to_bytes(8, "little") + b"N.",
    "a string": b"\x80\x04X" + (2**32 - 1).to_bytes(4, "little") + b".",
    "a longer string": b"\x80\x04\x8d" + (2**31).to_bytes(8, "little") + b".",
    "bytes": b"\x80\x04B" + (2**31).to_bytes(4, "little") + b".",
    "a bytearray": b"\x80\x05\x96" + (2**31).to_bytes(8, "little") + b".",
    "an integer": b"\x80\x04\x8b" + (2**31 - 1).to_bytes(4, "little") + b".",
    "a key of 2**60 tuples": b"\x80\x04})" + b"2\x86" * 60 + b"Ns.",
    "a key of a million tuples": b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns.",
    "a key that is a set": b"\x80\x04}" + b"(" * 60 + b"\x91" * 60 + b"Ns.",
    "a class that the user has registered": b"\x80\x04\x82\x01.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_few_bytes_cannot_take_much_memory(write, bomb):
    path = write(BOMBS[bomb])
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="truncated, or no memory snapshot"):
            er.load_snapshot(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * MIB


def test_two_segments_cannot_share_their_blocks(write):
    blocks = training()["segments"][0]["blocks"] * 2
    segments = [{"device": 0, "total_size": 1, "blocks": blocks} for _ in range(2)]
    with pytest.raises(DataError, match="two segments share their blocks"):
        er.load_snapshot(write({"segments": segments}))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_whatever_a_snapshot_may_hold_is_read(write, protocol):
    data = training()
    segment = data["segments"][0]
    segment |= {"segment_pool_id": (0, 2**63), "is_expandable": False, "of": None, "at": ()}
    segment["blocks"][0] |= {"few": [-1, 2**31, 2**64 - 1, 0.5, (1,), (1, 2, 3), [[], {}]]}
    event = data["device_traces"][0][0]
    event["frames"] = [{"filename": "\u00e9/" * 300 + "a.py", "line": 70_000, "name": ""}]
    event |= {"user_metadata": "x" * 70_000, "many": list(range(1000))}
    found = er.load_snapshot(write(pickle.dumps(data, protocol)))
    assert found == _snapshot(data, None)
    assert "a.py:70000" in {block.line for block in found.blocks}
