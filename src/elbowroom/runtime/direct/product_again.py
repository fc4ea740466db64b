"""Computes a linear layer or a convolution once more, from what its node has saved.

Backward of a later op may need what the layer has computed, after a program has changed it. The
node of the layer has saved its operands for its own backward, which is still to come.
"""

from typing import Any

import torch
from torch import Tensor

from elbowroom.runtime.consumers import RESHAPES


def product_again(node: Any) -> Tensor | None:
    """Returns what a layer has computed, once more, from what its node has saved.

    node: of the layer, or of a reshape or cast of its result. None for any other node, if its
    weight is frozen, and for a bias that is no parameter.
    """
    while node is not None and node.name().startswith((*RESHAPES, "ToCopy")):
        node = node.next_functions[0][0]
    name = "" if node is None else node.name()
    if name == "MmBackward0":
        x, weight = node._saved_self, _weight(node._saved_mat2, node.next_functions[1][0])
        return None if x is None or weight is None else torch.mm(x, weight).detach()
    if name == "ConvolutionBackward0":
        return _convolution(node)
    if name != "AddmmBackward0":
        return None
    x, weight = node._saved_mat1, _weight(node._saved_mat2, node.next_functions[2][0])
    bias = getattr(node.next_functions[0][0], "variable", None)
    if x is None or weight is None or bias is None:
        return None
    scales = {"beta": node._saved_beta, "alpha": node._saved_alpha}
    return torch.addmm(bias, x, weight, **scales).detach()


def _convolution(node: Any) -> Tensor | None:
    x, weight, (_, _, (of_bias, _)) = node._saved_input, node._saved_weight, node.next_functions
    bias = getattr(of_bias, "variable", None)
    if x is None or weight is None or (bias is None and any(node._saved_bias_sym_sizes_opt or ())):
        return None
    how = (
        *(node._saved_stride, node._saved_padding, node._saved_dilation),
        *(node._saved_transposed, node._saved_output_padding, node._saved_groups),
    )
    return torch.convolution(x, weight, bias, *how).detach()


def _weight(saved: Tensor | None, node: Any) -> Tensor | None:
    """Returns the transposed weight of a linear layer, or None.

    The layer saves it only if its input has a gradient. Else its parameter is looked up.
    """
    if saved is not None or node is None or node.name() != "TBackward0":
        return saved
    weight: Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    return None if weight is None else weight.t()
