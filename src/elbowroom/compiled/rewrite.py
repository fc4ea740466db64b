"""Puts codes of saved values into a joint graph.

    x (saved)   -->   x, then in forward  c = encode(x)      c is saved
                      in backward         x~ = decode(c)     for the readers of backward alone

Decode comes just before the first reader, like everything that backward computes. Nodes that
backward recomputes from x are copied first, so that forward uses x and backward x~. `undo` removes
all of it: a choice is judged on the graph that results from it. There the same code of the same
value has one fake tensor (`Joint.fakes`), whatever else is coded.
"""

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from elbowroom.codecs import BitMask, Codec, Facts
from elbowroom.codecs.facts import NOTHING
from elbowroom.codecs.quality import quality_of
from elbowroom.compiled import ops
from elbowroom.compiled.joint import Joint
from elbowroom.compiled.logits import AsLogit

_MASK = Facts(value=1.0)
_Plain = int | float | str | torch.dtype | torch.device
_NUMBERED = {ops.ENCODE: 4, ops.DECODE: 3}  # the argument that says which code it is: of no size


@dataclass(frozen=True)
class CodedValue:
    """One saved value to be held in fewer bytes.

    codec   that holds it; None: the value itself is held, in another memory
    facts   what is known of its elements
    floor   elements below it are held as if they were it
    ceiling likewise those above it
    source  the saved value in whose place this one is held; None: itself
    as_logit  how probabilities are held as logits (`logits.py`); None: as they are
    """

    node: fx.Node
    codec: Codec | None
    facts: Facts = NOTHING
    floor: float | None = None
    ceiling: float | None = None
    source: fx.Node | None = None
    as_logit: AsLogit | None = None

    @classmethod
    def mask(cls, node: fx.Node) -> "CodedValue":
        """A bool, held as bits."""
        return cls(node, BitMask(), _MASK)

    @property
    def replaced(self) -> fx.Node:
        """The saved value that it makes needless."""
        return self.node if self.source is None else self.source

    @property
    def is_lossy(self) -> bool:
        return self.codec is not None and not self.codec.lossless

    @property
    def error(self) -> float:
        """Squared error of the code on normal data, relative to their square."""
        return error_of(self.codec) if self.codec is not None else 0.0


def error_of(codec: Codec) -> float:
    """Squared error of a codec on normal data, relative to their square."""
    return 0.0 if codec.lossless else quality_of(codec, maps=False).error


class Rewriting:
    """A joint graph with some saved values in codes.

    saved  nodes that are saved in place of the values
    """

    def __init__(
        self,
        joint: Joint,
        saved: Collection[fx.Node],
        coded: Sequence[CodedValue],
        *,
        is_tentative: bool = False,
    ) -> None:
        """Rewrite. is_tentative: to be judged and undone."""
        self._joint = joint
        self._is_tentative = is_tentative
        self._analysis = joint.analysis
        self._made: list[fx.Node] = []
        self._moved: list[tuple[fx.Node, fx.Node, fx.Node]] = []
        self._mode = _fake_mode(joint.inputs)
        self._seeds: dict[torch.device, fx.Node] = {}  # one draw on each device
        self._sizes = _named_sizes(joint.inputs)
        before, after = joint.parts(saved)
        order = [n for n in joint.graph.nodes if n in after]
        self.saved = set(saved)
        decoded = {one.node: self._code(number, one) for number, one in enumerate(coded)}
        self._hand_over(decoded, order, before)
        joint.refresh(is_coded=True)

    def undo(self) -> None:
        """Removes all inserted nodes."""
        for reader, old, new in reversed(self._moved):
            reader.replace_input_with(new, old)
        for node in reversed(self._made):
            self._joint.graph.erase_node(node)
        self._joint.analysis = self._analysis

    def _seed_on(self, device: torch.device) -> fx.Node:
        """The seed that this run draws on a device."""
        if device not in self._seeds:
            place = list(self._joint.graph.find_nodes(op="placeholder"))[-1]
            self._seeds[device] = self._insert_call(place, ops.DRAW, device)
            self.saved.add(self._seeds[device])
        return self._seeds[device]

    def _code(self, number: int, one: CodedValue) -> fx.Node:
        """Encodes a value after it is computed; returns what backward reads in its place."""
        x, value, order = one.node, one.node.meta["val"], self._joint.order_of(one.node)
        seed = self._seed_on(value.device) if one.is_lossy else None
        self.saved.discard(x)
        size, place = self._size_of(x, _latest(x, seed))
        if one.codec is None:
            away = self._insert_call(place, ops.OFFLOAD, x, order)
            self.saved.add(away)
            given = (away, size, order, value.dtype, value.device)
            return self._insert_call(away, ops.FETCH, *given)
        if isinstance(one.codec, BitMask) and value.device.type == "cpu":
            return self._code_bytes(x, size, order, place)
        how = ops.coding_name(one.codec, one.facts), seed, number
        encoded = x
        for bound, op in (
            (one.floor, torch.ops.aten.maximum.default),
            (one.ceiling, torch.ops.aten.minimum.default),
        ):
            if bound is not None:
                scalar = {"dtype": value.dtype, "device": value.device}
                full = self._insert_call(place, torch.ops.aten.full.default, [], bound, **scalar)
                encoded = place = self._insert_call(full, op, encoded, full)
        if one.as_logit is not None:
            encoded = place = one.as_logit.logit_of(encoded, self._insert_call)
        parts = self._encoded(encoded, order, how, place)
        decoded = self._insert_call(parts[-1], ops.DECODE, parts, *how, size, order, value.dtype)
        if one.as_logit is None:
            return decoded
        return one.as_logit.of_logit(decoded, self._insert_call)

    def _encoded(
        self, x: fx.Node, order: Sequence[int], how: tuple[Any, ...], place: fx.Node
    ) -> list[fx.Node]:
        """The buffers of a code, which forward saves."""
        codes = self._insert_call(place, ops.ENCODE, x, order, *how)
        parts: list[fx.Node] = []
        for at in range(len(codes.meta["val"])):
            parts.append(
                self._insert_call(parts[-1] if parts else codes, operator.getitem, codes, at)
            )
        self.saved.update(parts)
        return parts

    def _code_bytes(
        self, x: fx.Node, size: list[int | fx.Node], order: Sequence[int], place: fx.Node
    ) -> fx.Node:
        """Code a mask whose memory loops write and read as bytes, by way of float32.

        Inductor's loops on a CPU write a bool an element at a time: 11 ns, and 4 ns to read it (AMD
        EPYC, AVX-512, torch 2.13); a float32 that becomes a byte 0.16, and back 0.35.
        """
        convert = torch.ops.prims.convert_element_type.default
        scalar = {"dtype": torch.float32, "device": x.meta["val"].device}
        one = self._insert_call(place, torch.ops.aten.full.default, [], 1.0, **scalar)
        zero = self._insert_call(one, torch.ops.aten.full.default, [], 0.0, **scalar)
        chosen = self._insert_call(zero, torch.ops.aten.where.self, x, one, zero)
        written = self._insert_call(chosen, convert, chosen, torch.uint8)
        how = ops.coding_name(BitMask(), _MASK), None, 0
        parts = self._encoded(written, order, how, written)
        given = parts, *how, size, order, torch.uint8
        read = self._insert_call(parts[-1], ops.DECODE, *given)
        number = self._insert_call(read, convert, read, torch.float32)
        return self._insert_call(number, torch.ops.aten.ne.Scalar, number, 0.0)

    def _size_of(self, x: fx.Node, place: fx.Node) -> tuple[list[int | fx.Node], fx.Node]:
        """Returns the size that decoding gives, and the node after which all of it is known.

        A size that depends on symbols is a number that forward passes on.
        """
        sizes: list[int | fx.Node] = []
        for dim, size in enumerate(x.meta["val"].shape):
            if isinstance(size, int):
                sizes.append(size)
                continue
            known = self._sizes.get(size.node.expr)
            if known is None:
                known = place = self._insert_call(place, torch.ops.aten.sym_size.int, x, dim)
            self.saved.add(known)
            sizes.append(known)
        return sizes, place

    def _insert_call(self, place: fx.Node, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call after a node, with the fake value that it gives."""
        with self._joint.graph.inserting_after(place):
            node = self._joint.graph.call_function(op, args, kwargs)
        given = fx.map_arg(args, lambda a: a.meta["val"])
        if not self._is_tentative:
            node.meta["val"] = self._run(op, given, kwargs)
        else:
            skipped = _NUMBERED.get(op, -1)
            parts = tuple(_key(one) for at, one in enumerate(given) if at != skipped)
            key = op, parts, tuple(kwargs.items())
            if key not in self._joint.fakes:  # keeps arguments that ids identify
                self._joint.fakes[key] = given, self._run(op, given, kwargs)
            node.meta["val"] = self._joint.fakes[key][1]
        self._made.append(node)
        return node

    def _run(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with self._mode:
            return op(*args, **kwargs)

    def _hand_over(
        self, decoded: dict[fx.Node, fx.Node], order: Sequence[fx.Node], before: Collection[fx.Node]
    ) -> None:
        """Passes backward the decoded values, and copies of nodes that it recomputes from them."""
        known = dict(decoded)
        for node in order:
            read = [n for n in node.all_input_nodes if n in known]
            if not read or node in decoded:
                continue
            if node in before:
                with self._joint.graph.inserting_after(node):
                    copy = self._joint.graph.node_copy(node, lambda n: known.get(n, n))
                self._made.append(copy)
                known[node] = copy
                continue
            for one in read:
                node.replace_input_with(one, known[one])
                self._moved.append((node, one, known[one]))


def _key(value: Any) -> Any:
    """Identifies a value without comparing tensors or symbols."""
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return value if isinstance(value, _Plain) else id(value)


def _latest(x: fx.Node, seed: fx.Node | None) -> fx.Node:
    """The node after which both are known: an input may come before the seed."""
    return seed if seed is not None and x.op == "placeholder" else x


def _named_sizes(inputs: Iterable[fx.Node]) -> dict[Any, fx.Node]:
    """Inputs that are sizes, by their expressions of symbols."""
    values = ((n, n.meta.get("val")) for n in inputs)
    return {value.node.expr: n for n, value in values if isinstance(value, torch.SymInt)}


def _fake_mode(inputs: Iterable[fx.Node]) -> Any:
    """The mode of the graph's fake tensors."""
    for node in inputs:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return torch._subclasses.FakeTensorMode()
