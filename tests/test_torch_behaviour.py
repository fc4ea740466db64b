"""PyTorch's behavior that the runtime stands on.

A failure here after an upgrade says which rule to think over again. Rules: DESIGN.md, section 4.
Each test names, in its last line or so, what would break.
"""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


class Packed:
    """A pair of hooks that notes what is packed, and gives back the same memory."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.hooks = saved_tensors_hooks(self.pack, lambda x: x)

    def pack(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x.detach()

    def __enter__(self) -> "Packed":
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.hooks.__exit__(*error)


class Calls(TorchFunctionMode):
    """The names of the torch functions that Python calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_only_the_innermost_hooks_run():
    x = torch.ones(3, requires_grad=True)
    with Packed() as outer, Packed() as inner:
        (x * x).sum()
    assert (len(outer.seen), len(inner.seen)) == (0, 2)


def test_another_thread_sees_no_hooks():
    import threading

    x = torch.ones(3, requires_grad=True)
    with Packed() as packed:
        thread = threading.Thread(target=lambda: (x * x).sum())
        thread.start()
        thread.join()
    assert not packed.seen


def test_hooks_switch_off_the_check_for_changes_in_place():
    x = torch.full((1,), 2.0, requires_grad=True)
    y = x * 1
    plain = y * y
    y.detach().mul_(10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain.sum().backward()
    y = x * 1
    with Packed():
        hooked = y * y
    y.detach().mul_(10)
    hooked.sum().backward()
    assert x.grad == 40.0  # not 4: wrong, and no error; so every handle of ours checks the version


def test_an_unpacked_tensor_shares_its_version_counter():
    seen = []

    class Overwrites(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a.clone()

        @staticmethod
        def backward(ctx, grad):
            ctx.saved_tensors[0].zero_()
            return grad

    def pack(x):
        seen.append(x.detach())
        return seen[-1]

    x = torch.ones(3, requires_grad=True) * 2
    with saved_tensors_hooks(pack, lambda held: held):
        y = Overwrites.apply(x)
    y.sum().backward()
    assert (
        seen[0]._version == 1
    )  # so a second restore can notice that a backward in Python overwrote it


def test_returning_the_output_itself_from_pack_leaks():
    gc.disable()
    try:
        refs = []
        for pack in (lambda x: x, lambda x: x.detach()):
            x = torch.ones(3, requires_grad=True)
            with saved_tensors_hooks(pack, lambda x: x):
                y = x.exp()
            refs.append(weakref.ref(y))
            del y
        assert [ref() is None for ref in refs] == [False, True]  # so handles hold x.detach()
    finally:
        gc.enable()


def test_weights_are_packed_as_views():
    layer = nn.Linear(3, 5)
    with Packed() as packed:
        layer(layer.weight.new_ones(2, 3).requires_grad_() * 1)
    ours = [x for x in packed.seen if x.data_ptr() == layer.weight.data_ptr()]
    assert ours
    assert all(not isinstance(x, nn.Parameter) and x._base is layer.weight for x in ours)


def test_a_view_of_a_frozen_parameter_knows_its_base():
    weight = nn.Parameter(torch.ones(3, 3), requires_grad=False)
    assert weight.t()._base is weight
    with torch.no_grad():
        assert weight.t()._base is weight


def test_one_pack_a_save_not_a_tensor():
    x = torch.ones(3, requires_grad=True) * 1
    with Packed() as packed:
        x * x
    assert [saved is x for saved in packed.seen] == [
        True,
        True,
    ]  # so a storage is decided on once, in a slot


def test_a_witness_shares_the_version_counter_and_no_memory():
    x = torch.ones(1000)
    witness = x.detach()
    witness.data = torch.empty(0)
    assert (witness._version, witness.untyped_storage().nbytes()) == (0, 0)
    x.add_(1)
    x[:3].zero_()
    assert witness._version == x._version == 2
    weak = StorageWeakRef(x.untyped_storage())
    del x
    assert weak.expired()


def test_data_has_a_version_counter_of_its_own():
    x = torch.ones(3)
    x.data.add_(1)
    assert (
        x._version == 0
    )  # a write through .data cannot be seen; plain autograd does not see it either
    x.detach().add_(1)
    assert x._version == 1


def test_an_update_of_running_statistics_is_not_a_version():
    norm = nn.BatchNorm1d(3)
    before = norm.running_mean._version
    norm(torch.randn(4, 3))
    assert (
        norm.running_mean._version == before
    )  # so two forwards before one backward are not an error


def test_use_counts_of_a_storage():
    memory = torch.empty(8)
    count = torch._C._storage_Use_Count
    address = memory.untyped_storage()._cdata
    idle = count(address)
    view = memory[:4].view(torch.int32)
    assert count(address) == idle + 1
    detached = view.detach()
    assert count(address) == idle + 2
    del view, detached
    assert count(address) == idle  # so the arena knows when a block is free


def test_a_dead_storage_is_known_to_be_dead():
    x = torch.ones(3)
    weak = StorageWeakRef(x.untyped_storage())
    alive = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    assert alive is not None
    del alive, x
    assert weak.expired()
    assert torch.UntypedStorage._new_with_weak_ptr(weak.cdata) is None


def test_a_function_mode_sees_each_call_once():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    with Calls() as calls:
        h = F.conv2d(x, torch.randn(4, 3, 3, 3))
        h = F.relu(F.batch_norm(h, None, None, training=True), inplace=True)
        h = F.dropout(F.gelu(h), 0.5)
        h = F.layer_norm(F.silu(h), h.shape[-1:])
        h @ h
    names = [name for name in calls.names if not name.startswith(("__get__", "randn"))]
    wanted = ["conv2d", "batch_norm", "relu", "gelu", "dropout", "silu", "layer_norm"]
    assert names[:-1] == wanted
    assert names[-1] in ("matmul", "__matmul__")


def test_a_function_mode_sees_composed_functions_as_one():
    layer = nn.MultiheadAttention(8, 2)
    x = torch.randn(3, 2, 8)
    with Calls() as calls:
        layer(x, x, x)
    assert "multi_head_attention_forward" in calls.names
    assert "linear" not in calls.names


def test_a_function_mode_does_not_see_a_custom_function():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    with Calls() as calls:
        Double.apply(torch.ones(3))
    assert "apply" not in calls.names


def test_what_an_op_saves_comes_in_order_with_its_statistics_last():
    x = torch.randn(4, 6, requires_grad=True) * 1
    with Packed() as packed:
        F.layer_norm(x, (6,))
    assert [tuple(saved.shape) for saved in packed.seen][-2:] == [(4, 1), (4, 1)]
    packed.seen.clear()
    with packed:
        F.batch_norm(x, None, None, torch.ones(6), torch.zeros(6), training=True)
    assert [tuple(saved.shape) for saved in packed.seen][-2:] == [(6,), (6,)]
    packed.seen.clear()
    with packed:
        F.group_norm(x, 2)
    assert [tuple(saved.shape) for saved in packed.seen][-2:] == [(4, 2), (4, 2)]


def test_dropout_saves_its_factor_and_nothing_else():
    x = torch.randn(4, 6, requires_grad=True) * 1
    with Packed() as packed:
        F.dropout(x, 0.25)
    (noise,) = packed.seen
    assert noise.dtype is torch.float32
    assert set(noise.unique().tolist()) <= {0.0, float(torch.ones(()) / 0.75)}


def test_dropout_that_drops_nothing_gives_its_input_back():
    x = torch.randn(4, 6, requires_grad=True) * 1
    assert F.dropout(x, 0.0, training=True) is x
    assert F.dropout(x, 0.5, training=False) is x  # so it is no producer of anything


def test_relu_saves_its_output_and_reads_only_where_it_is_positive():
    x = torch.randn(100, requires_grad=True)
    with saved_tensors_hooks(lambda x: (x > 0).float(), lambda mask: mask):
        y = F.relu(x * 1)
    y.sum().backward()
    assert torch.equal(x.grad, (x > 0).float())


def test_a_wrong_dtype_out_of_unpack_is_accepted():
    x = torch.ones(3, requires_grad=True) * 1
    with saved_tensors_hooks(lambda x: x.detach(), lambda x: x.double()):
        y = (x * x).sum()
    y.backward()  # no error: so a rebuilt tensor's dtype is checked by us


@pytest.mark.parametrize("reentrant", [False, True])
def test_hooks_outside_a_checkpoint_see_only_its_inputs(reentrant):
    x = torch.ones(3, requires_grad=True) * 1
    with Packed() as packed:
        y = checkpoint(lambda x: x.exp().sin().sum(), x, use_reentrant=reentrant)
    assert [saved.data_ptr() for saved in packed.seen] == [x.data_ptr()] * len(packed.seen)
    y.backward()


def test_functorch_refuses_hooks():
    with (
        pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"),
        saved_tensors_hooks(lambda x: x, lambda x: x),
    ):
        torch.func.grad(lambda x: (x * x).sum())(torch.ones(3))


def test_a_callback_runs_when_backward_ends():
    ran = []

    class Queues(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a.clone()

        @staticmethod
        def backward(ctx, grad):
            assert torch._C._current_graph_task_id() != -1
            torch.autograd.Variable._execution_engine.queue_callback(lambda: ran.append(1))
            assert not ran
            return grad

    Queues.apply(torch.ones(3, requires_grad=True)).sum().backward()
    assert ran == [1]
    assert torch._C._current_graph_task_id() == -1


def test_nodes_are_the_same_objects_each_time_they_are_asked_for():
    x = torch.ones(3, requires_grad=True) * 1
    y = x.view(3, 1)
    assert y.grad_fn.next_functions[0][0] is x.grad_fn
    assert y.grad_fn.name() == "ViewBackward0"
    assert x.grad_fn.next_functions[0][0].name() == "torch::autograd::AccumulateGrad"
    assert x.grad_fn.next_functions[0][0].variable.requires_grad


def test_numpy_forbids_for_good_that_a_storage_is_resized():
    x = torch.zeros(10)
    x.numpy()
    with pytest.raises(RuntimeError, match="not resizable"):  # if not: launch.py may use numpy()
        x.untyped_storage().resize_(0)


def test_a_node_tells_what_the_hook_made_of_its_saved_tensor_without_unpacking():
    unpacked = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            assert ctx._raw_saved_tensors[0].data == "packed"
            return grad

    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda _: "packed", unpacked.append):
        y = Square.apply(x)
    y.sum().backward()
    assert not unpacked
    with pytest.raises(RuntimeError, match="second time"):
        y.grad_fn._raw_saved_tensors  # noqa: B018
