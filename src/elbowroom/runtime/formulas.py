"""Table of derivative formulas: how the backward of each op uses its saved tensors.

    node of the graph -> name of the saved tensor -> how its formula uses the value

Nodes and names are those that autograd gives them (`torch/.../derivatives.yaml` has the formulas;
"Backward0" and "Backward1" are overloads). Tensors of nodes that are not in the table are held
exactly. Rows are checked one by one, by derivatives of the gradient itself
(tests/numerics/test_formulas.py). One tensor may be saved by several nodes, under different names:
the decision depends on all readers of a storage.

A formula may be linear and still be fine: a product d(a b) = a db passes the error of `a` on
upstream, element by element, where a matmul sums over thousands. A divisor, a statistic or a tensor
that is compared is never coded, however small the error: a 4-level code under `div`, `log` or
`sqrt` gave gradients wrong by factors of 8 to 13,000.
"""

from math import isfinite

from torch import Tensor

from elbowroom.plan.site import Formula

SUMMED, MATRIX, PRODUCT, CURVED = Formula.SUMMED, Formula.MATRIX, Formula.PRODUCT, Formula.CURVED
PROBABILITY, LOG_PROBABILITY = Formula.PROBABILITY, Formula.LOG_PROBABILITY
COMPARED, SINGULAR, STATISTIC = Formula.COMPARED, Formula.SINGULAR, Formula.STATISTIC
DIFFERENCE, INDEX, SHAPE = Formula.DIFFERENCE, Formula.INDEX, Formula.SHAPE
PERIODIC, TAIL, RELATIVE = Formula.PERIODIC, Formula.TAIL, Formula.RELATIVE

# What several nodes save under the same names.
_NORMALIZED = {"input": SUMMED, "weight": STATISTIC, "result1": STATISTIC, "result2": STATISTIC}
_RUNNING = {"running_mean": STATISTIC, "running_var": STATISTIC}
_RESERVE = {"result3": INDEX}
_TARGETS = {"self": SHAPE, "target": INDEX, "weight": STATISTIC, "total_weight": STATISTIC}

FORMULAS: dict[str, dict[str, Formula]] = {
    # Contractions: each element of a gradient is a sum over many of the saved ones.
    "AddbmmBackward0": {"batch1": SUMMED, "batch2": SUMMED},  # grad @ batch2^T, batch1^T @ grad
    "AddmmBackward0": {"mat1": SUMMED, "mat2": SUMMED},  # grad @ mat2^T, mat1^T @ grad
    "AddmvBackward0": {"mat": SUMMED, "vec": SUMMED},  # outer(grad, vec), mat^T @ grad
    "AddrBackward0": {"vec1": SUMMED, "vec2": SUMMED},  # grad @ vec2, vec1 @ grad
    # ... of each matrix of a batch
    "BaddbmmBackward0": {"batch1": MATRIX, "batch2": MATRIX},  # grad @ batch2^T, batch1^T @ grad
    "BmmBackward0": {"self": MATRIX, "mat2": MATRIX},  # grad @ mat2^T, self^T @ grad
    # solves by self^T: inv(self^T) grad, -inv(self^T) grad @ result^T:
    "LinalgSolveTriangularBackward0": {"self": SINGULAR, "result": MATRIX},
    # the two transposed convolutions
    "ConvolutionBackward0": {"input": SUMMED, "weight": STATISTIC},
    "ConvolutionOverrideableBackward0": {"input": SUMMED, "weight": STATISTIC},  # as convolution
    "CudnnConvolutionBackward0": {"self": SUMMED, "weight": STATISTIC},  # as convolution
    "CudnnConvolutionTransposeBackward0": {"self": SUMMED, "weight": STATISTIC},  # as convolution
    "MkldnnConvolutionBackward0": {"self": SUMMED, "weight": STATISTIC},  # as convolution
    "MiopenConvolutionBackward0": {"self": SUMMED, "weight": STATISTIC},  # as convolution
    "SlowConv2DBackward0": {"self": SUMMED, "weight": STATISTIC},  # as convolution
    "SlowConv3DBackward0": {"self": SUMMED, "weight": STATISTIC},  # as convolution
    "ConvDepthwise2DBackward0": {"self": SUMMED, "weight": STATISTIC},  # as convolution
    "ConvDepthwise3DBackward0": {"self": SUMMED, "weight": STATISTIC},  # as convolution
    "ConvTbcBackward0": {"self": SUMMED, "weight": STATISTIC, "bias": SHAPE},  # as convolution
    "SlowConvDilated2DBackward0": {"self": SUMMED, "weight": STATISTIC},  # as convolution
    "SlowConvDilated3DBackward0": {"self": SUMMED, "weight": STATISTIC},  # as convolution
    "SlowConvTranspose2DBackward0": {"self": SUMMED, "weight": STATISTIC},  # as convolution
    "SlowConvTranspose3DBackward0": {"self": SUMMED, "weight": STATISTIC},  # as convolution
    "DotBackward0": {"self": SUMMED, "tensor": SUMMED},  # grad * tensor, grad * self
    "GroupedMmBackward0": {"self": SUMMED, "mat2": SUMMED, "offs": INDEX},  # as mm, by group
    "LinearBackward0": {"input": SUMMED, "weight": STATISTIC},  # grad @ weight, grad^T @ input
    "MkldnnLinearBackward0": {"self": SUMMED, "weight": STATISTIC},  # as linear
    "MmBackward0": {"self": SUMMED, "mat2": SUMMED},  # grad @ mat2^T, self^T @ grad
    "MvBackward0": {"self": SUMMED, "vec": SUMMED},  # outer(grad, vec), self^T @ grad
    # products of the other two, summed
    "TrilinearBackward0": {"i1": SUMMED, "i2": SUMMED, "i3": SUMMED},
    "VdotBackward0": {"self": SUMMED, "other": SUMMED},  # as dot
    # weights of the grid; the grid chooses the cell
    "GridSampler2DBackward0": {"input": SUMMED, "grid": COMPARED},
    "GridSampler3DBackward0": {"input": SUMMED, "grid": COMPARED},  # as grid_sampler_2d
    # Normalization: smooth in the input where mean and rstd are given; those are never coded.
    # (grad - mean(grad) - xhat mean(grad xhat)) weight rstd
    "NativeBatchNormBackward0": _NORMALIZED | _RUNNING,
    "NativeBatchNormLegitBackward0": _NORMALIZED | _RUNNING,  # as native_batch_norm
    "NativeBatchNormLegitBackward1": _NORMALIZED,  # as native_batch_norm
    "BatchNormWithUpdateBackward0": _NORMALIZED | _RUNNING | _RESERVE,  # as native_batch_norm
    "CudnnBatchNormBackward0": _NORMALIZED | _RUNNING | _RESERVE,  # as native_batch_norm
    "MiopenBatchNormBackward0": _NORMALIZED | _RUNNING,  # as native_batch_norm
    "NativeGroupNormBackward0": _NORMALIZED,  # as native_batch_norm, by group
    "NativeLayerNormBackward0": _NORMALIZED | {"bias": SHAPE},  # as native_batch_norm, by row
    # as layer norm without a mean
    "FusedRmsNormBackward0": {"input": SUMMED, "weight": STATISTIC, "result1": STATISTIC},
    # of weights
    "WeightNormInterfaceBackward0": {"v": STATISTIC, "g": STATISTIC, "result1": STATISTIC},
    # Products, element by element: linear, but nothing averages the error.
    # of its inputs, grad / tensor2, -grad tensor1 / tensor2^2:
    "AddcdivBackward0": {"tensor1": RELATIVE, "tensor2": RELATIVE},  # tensor1 / tensor2^2
    "AddcmulBackward0": {"tensor1": PRODUCT, "tensor2": PRODUCT},  # grad tensor2, grad tensor1
    # of its inputs, grad (self - target) / (self (1 - self)):
    "BinaryCrossEntropyBackward0": {"self": SINGULAR, "target": PRODUCT, "weight": STATISTIC},
    "ExpBackward0": {"result": PROBABILITY},  # grad result
    "Exp2Backward0": {"result": PROBABILITY},  # grad result log 2
    "Expm1Backward0": {"result": PRODUCT},  # grad (result + 1)
    "HypotBackward0": dict.fromkeys(("self", "other", "result"), RELATIVE),  # grad self / result
    # of its inputs, grad (1 - weight), grad weight, grad (end - self):
    "LerpBackward1": {"self": PRODUCT, "end": PRODUCT, "weight": PRODUCT},
    "LdexpBackward0": {"other": CURVED, "result": PRODUCT},  # grad 2^other
    "LinalgCrossBackward0": {"self": PRODUCT, "other": PRODUCT},  # cross(other, grad)
    "MulBackward0": {"self": PRODUCT, "other": PRODUCT},  # grad other, grad self
    "ProdBackward0": {"self": SINGULAR, "result": SINGULAR},  # grad result / self
    "ProdBackward1": {"self": SINGULAR, "result": SINGULAR},  # grad result / self
    "RreluWithNoiseBackward0": {"self": COMPARED, "noise": PRODUCT},  # grad noise
    "RreluWithNoiseBackward1": {"result": COMPARED, "noise": PRODUCT},  # in place: grad noise
    # of its inputs, grad (self - mean) / (n - 1) / std:
    "StdMeanBackward0": {"self": PRODUCT, "result0": SINGULAR},
    "StdBackward0": {"self": PRODUCT, "result": RELATIVE},  # as std_mean
    "VarMeanBackward0": {"self": PRODUCT},  # 2 grad (self - mean) / (n - 1)
    "VarBackward0": {"self": PRODUCT},  # as var_mean
    # Smooth functions of the value, with bounded derivatives.
    "AsinhBackward0": {"self": CURVED},  # grad / sqrt(self^2 + 1)
    "AtanBackward0": {"self": CURVED},  # grad / (self^2 + 1)
    "CeluBackward0": {"self": CURVED},  # grad exp(min(self, 0))
    "CeluBackward1": {"result": CURVED},  # in place: grad (1 + min(result, 0) / alpha)
    "EluBackward0": {"self": CURVED},  # grad exp(min(self, 0))
    "EluBackward1": {"result": CURVED},  # in place: grad where result > 0, else result + alpha
    "ErfBackward0": {"self": CURVED},  # grad 2 / sqrt(pi) exp(-self^2)
    "ErfcBackward0": {"self": CURVED},  # -grad 2 / sqrt(pi) exp(-self^2)
    "GeluBackward0": {"self": CURVED},  # grad (Phi(self) + self phi(self))
    "GluBackward0": {"self": CURVED},  # grad sigmoid, grad a sigmoid (1 - sigmoid)
    # of its inputs, grad (self / 3 + 1/2) inside +-3: jumps of a half at the ends:
    "HardswishBackward0": {"self": CURVED},
    "MishBackward0": {"self": CURVED},  # grad of self tanh(softplus(self))
    "SigmoidBackward0": {"result": CURVED},  # grad result (1 - result)
    "SiluBackward0": {"self": CURVED},  # grad sigmoid (1 + self (1 - sigmoid))
    # 2 grad (self result - 1 / sqrt(pi))
    "SpecialErfcxBackward0": {"self": CURVED, "result": PRODUCT},
    "TanhBackward0": {"result": CURVED},  # grad (1 - result^2)
    # Softmax and what is exponential in the saved value.
    "SoftmaxBackward0": {"result": PROBABILITY},  # result (grad - sum(grad result))
    "SafeSoftmaxBackward0": {"result": PROBABILITY},  # as softmax
    "MaskedSoftmaxBackward0": {"result": PROBABILITY, "mask": INDEX},  # as softmax
    "SparseSoftmaxBackward0": {"result": PROBABILITY},  # as softmax
    "LogSoftmaxBackward0": {"result": LOG_PROBABILITY},  # grad - exp(result) sum(grad)
    "SoftplusBackward0": {"self": TAIL},  # grad sigmoid(self)
    # Differences and tails: as a model fits its data, what is left is far less than the value, and
    # an error of the value is not.
    # of its inputs, grad (sigmoid(self) - target):
    "BinaryCrossEntropyWithLogitsBackward0": {
        "self": DIFFERENCE,
        "target": DIFFERENCE,
        "weight": STATISTIC,
        "pos_weight": STATISTIC,
    },
    "HuberLossBackward0": {"self": DIFFERENCE, "target": DIFFERENCE},  # grad clamp(self - target)
    # of its inputs, grad sigmoid(-self); exp(-|self|) on a CPU:
    "LogSigmoidBackward0": {"self": DIFFERENCE, "buffer": DIFFERENCE},
    # of its inputs, grad / (1 + exp(other - self)):
    "LogaddexpBackward0": {"self": DIFFERENCE, "other": DIFFERENCE},
    "Logaddexp2Backward0": {"self": DIFFERENCE, "other": DIFFERENCE},  # as logaddexp
    # of its inputs, sums of grad exp(self - result):
    "LogcumsumexpBackward0": {"self": DIFFERENCE, "result": DIFFERENCE},
    "LogsumexpBackward0": {"self": DIFFERENCE, "result": STATISTIC},  # grad exp(self - result)
    "MseLossBackward0": {"self": DIFFERENCE, "target": DIFFERENCE},  # 2 grad (self - target)
    # as huber_loss:
    "SmoothL1LossBackward0": {"self": DIFFERENCE, "target": DIFFERENCE},
    # of its inputs, -grad target sigmoid(-target self):
    "SoftMarginLossBackward0": {"self": DIFFERENCE, "target": DIFFERENCE},
    # Shapes and strides: no value is read.
    "AdaptiveAvgPool2DBackward0": {"self": SHAPE},  # grad / area
    "AdaptiveAvgPool3DBackward0": {"self": SHAPE},  # grad / area
    "AdaptiveMaxPool2DBackward0": {"self": SHAPE, "result1": INDEX},  # grad to the indices
    "AdaptiveMaxPool3DBackward0": {"self": SHAPE, "result1": INDEX},  # grad to the indices
    "AvgPool2DBackward0": {"self": SHAPE},  # grad / area
    "AvgPool3DBackward0": {"self": SHAPE},  # grad / area
    "FftR2CBackward0": {"self": SHAPE},  # inverse transform
    "FractionalMaxPool2DBackward0": {"self": SHAPE, "result1": INDEX},  # grad to the indices
    "FractionalMaxPool3DBackward0": {"self": SHAPE, "result1": INDEX},  # grad to the indices
    "MaxPool2DWithIndicesBackward0": {"self": SHAPE, "result1": INDEX},  # grad to the indices
    "MaxPool3DWithIndicesBackward0": {"self": SHAPE, "result1": INDEX},  # grad to the indices
    # of its inputs, grad at the indices:
    "MaxUnpool2DBackward0": {"indices": INDEX},  # grad at the indices
    "MaxUnpool3DBackward0": {"indices": INDEX},  # grad at the indices
    # of its inputs, -grad weight / total_weight to the targets:
    "NllLoss2DBackward0": _TARGETS,
    # of its inputs, -grad weight / total_weight to the targets:
    "NllLossBackward0": _TARGETS,
    "ReflectionPad1DBackward0": {"self": SHAPE},  # sums of grad
    "ReflectionPad2DBackward0": {"self": SHAPE},  # sums of grad
    "ReflectionPad3DBackward0": {"self": SHAPE},  # sums of grad
    "ReplicationPad1DBackward0": {"self": SHAPE},  # sums of grad
    "ReplicationPad2DBackward0": {"self": SHAPE},  # sums of grad
    "ReplicationPad3DBackward0": {"self": SHAPE},  # sums of grad
    # Order and sign: a small error turns a gradient on or off.
    "AbsBackward0": {"self": COMPARED},  # grad sgn(self)
    "AmaxBackward0": {"self": COMPARED, "result": COMPARED},  # grad where self == result
    "AminBackward0": {"self": COMPARED, "result": COMPARED},  # grad where self == result
    "AminmaxBackward0": {"self": COMPARED, "max": COMPARED, "min": COMPARED},  # as amax
    # Equal to a bound: torch 2.13 passes grad; 2.14 nothing, or half where the bound is a tensor.
    "ClampMaxBackward0": {"self": COMPARED},  # grad where self <= max
    "ClampMaxBackward1": {"self": COMPARED, "max": COMPARED},  # grad where self <= max
    "ClampMinBackward0": {"self": COMPARED},  # grad where self >= min
    "ClampMinBackward1": {"self": COMPARED, "min": COMPARED},  # grad where self >= min
    # of its inputs, grad where min <= self <= max:
    "ClampBackward0": {"self": COMPARED, "min": COMPARED, "max": COMPARED},
    # of its inputs, grad where min <= self <= max:
    "ClampBackward1": {"self": COMPARED, "min": COMPARED, "max": COMPARED},
    "CopysignBackward0": {"self": SINGULAR, "result": SINGULAR},  # grad sgn
    "FmaxBackward0": {"self": COMPARED, "other": COMPARED},  # grad where self >= other
    "FminBackward0": {"self": COMPARED, "other": COMPARED},  # grad where self <= other
    "FmodBackward1": {"self": COMPARED, "other": SINGULAR},  # -grad trunc(self / other)
    "HardshrinkBackward0": {"self": COMPARED},  # grad where |self| > lambda
    "HardsigmoidBackward0": {"self": COMPARED},  # grad / 6 inside +-3
    "HardtanhBackward0": {"self": COMPARED},  # grad where min < self < max
    "LeakyReluBackward0": {"self": COMPARED},  # grad, times slope where self <= 0
    "LeakyReluBackward1": {"result": COMPARED},  # in place: as leaky_relu, whose signs it keeps
    "MaxBackward1": {"self": COMPARED, "result": COMPARED},  # grad where self == result
    "MaximumBackward0": {"self": COMPARED, "other": COMPARED},  # grad where self >= other
    "MedianBackward0": {"self": COMPARED, "result": COMPARED},  # grad where self == result
    "MinBackward1": {"self": COMPARED, "result": COMPARED},  # grad where self == result
    "MinimumBackward0": {"self": COMPARED, "other": COMPARED},  # grad where self <= other
    # of its inputs, grad where the margin is violated:
    "MultiMarginLossBackward0": {"self": COMPARED, "target": INDEX, "weight": STATISTIC},
    # of its inputs, grad where the margin is violated:
    "MultilabelMarginLossBackward0": {"self": COMPARED, "target": INDEX, "is_target": STATISTIC},
    "NanToNumBackward0": {"self": COMPARED},  # grad where self is finite
    "NanmedianBackward0": {"self": COMPARED, "result": COMPARED},  # grad where self == result
    "NansumBackward0": {"self": COMPARED},  # grad where self is a number
    # grad, times weight where self <= 0
    "PreluKernelBackward0": {"self": COMPARED, "weight": STATISTIC},
    "ReluBackward0": {"result": COMPARED},  # grad where result > 0
    "RemainderBackward1": {"self": COMPARED, "other": SINGULAR},  # -grad floor(self / other)
    "SoftshrinkBackward0": {"self": COMPARED},  # grad where |self| > lambda
    "ThresholdBackward0": {"self": COMPARED},  # grad where self > threshold
    "ThresholdBackward1": {"self": COMPARED},  # in place: as threshold
    # Sines: what sin(30 x) of a coordinate network saves spans many turns.
    "CosBackward0": {"self": PERIODIC},  # -grad sin(self)
    "SinBackward0": {"self": PERIODIC},  # grad cos(self)
    "SincBackward0": {"self": PERIODIC},  # grad of sin(pi self) / (pi self)
    # Divisions, logarithms, roots: an error near zero has no bound, unless it is a share of each
    # element, and the formula has a power of that.
    "AcosBackward0": {"self": SINGULAR},  # -grad / sqrt(1 - self^2)
    "AcoshBackward0": {"self": SINGULAR},  # grad / sqrt(self^2 - 1)
    "AsinBackward0": {"self": SINGULAR},  # grad / sqrt(1 - self^2)
    "AtanhBackward0": {"self": SINGULAR},  # grad / (1 - self^2)
    "Atan2Backward0": {"self": SINGULAR, "other": SINGULAR},  # grad other / (self^2 + other^2)
    "CoshBackward0": {"self": SINGULAR},  # grad sinh(self)
    "CumprodBackward0": {"self": SINGULAR, "result": SINGULAR},  # sums of grad result / self
    "DigammaBackward0": {"self": SINGULAR},  # grad polygamma(1, self)
    # of its inputs, grad (self - other) / result:
    "DistBackward0": {"self": SINGULAR, "other": SINGULAR, "result": SINGULAR},
    "DivBackward0": {"self": RELATIVE, "other": RELATIVE},  # grad / other, -grad self / other^2
    # zero where it is rounded: the mode decides, see `_quotient`:
    "DivBackward2": {"self": RELATIVE, "other": RELATIVE},
    "ErfinvBackward0": {"self": SINGULAR},  # grad sqrt(pi) / 2 exp(erfinv(self)^2)
    "LgammaBackward0": {"self": SINGULAR},  # grad digamma(self)
    # of its inputs, grad self |self|^(p - 2) / result^(p - 1): p decides, see `_length`:
    "LinalgVectorNormBackward0": {"self": SINGULAR, "result": SINGULAR},
    "LogBackward0": {"self": RELATIVE},  # grad / self
    "Log10Backward0": {"self": RELATIVE},  # grad / (self log 10)
    "Log1PBackward0": {"self": SINGULAR},  # grad / (self + 1)
    "Log2Backward0": {"self": RELATIVE},  # grad / (self log 2)
    "LogitBackward0": {"self": SINGULAR},  # grad / (self (1 - self))
    "NormBackward0": {"self": SINGULAR, "result": SINGULAR},  # as linalg_vector_norm
    "NormBackward1": {"self": SINGULAR, "result": SINGULAR},  # as linalg_vector_norm
    # of its inputs, grad exponent self^(exponent - 1), grad result log(self):
    # of its inputs, grad exponent self^(exponent - 1): the exponent decides, see `_power`:
    "PowBackward0": {"self": PRODUCT},
    "PowBackward1": {"self": SINGULAR, "exponent": SINGULAR, "result": SINGULAR},
    "ReciprocalBackward0": {"result": RELATIVE},  # -grad result^2, large where self is small
    "RenormBackward0": {"self": SINGULAR},  # as a norm
    "RsqrtBackward0": {"result": RELATIVE},  # -grad result^3 / 2, large where self is small
    "SinhBackward0": {"self": SINGULAR},  # grad cosh(self)
    "SqrtBackward0": {"result": RELATIVE},  # grad / (2 result)
    "TanBackward0": {"result": SINGULAR},  # grad (1 + result^2)
    "XlogyBackward0": {"self": PRODUCT, "other": SINGULAR},  # grad log(other), grad self / other
    # Integers and booleans that select.
    # by alignment
    "CtcLossBackward0": {
        "log_probs": SINGULAR,
        "result0": SINGULAR,
        "result1": SINGULAR,
        "targets": INDEX,
    },
    "CummaxBackward0": {"self": SHAPE, "indices": INDEX},  # grad to the indices
    "CumminBackward0": {"self": SHAPE, "indices": INDEX},  # grad to the indices
    # of its inputs, grad to the indices:
    "EmbeddingBagBackward0": {
        "indices": INDEX,
        "offsets": INDEX,
        "per_sample_weights": PRODUCT,
        "weight": STATISTIC,
        "result1": INDEX,
        "result2": INDEX,
        "result3": INDEX,
    },
    "EmbeddingBackward0": {"indices": INDEX},  # grad to the indices
    "GatherBackward0": {"self": SHAPE, "index": INDEX},  # grad to the indices
    "IndexAddBackward0": {"source": SHAPE, "index": INDEX},  # grad at the indices
    "IndexCopyBackward0": {"source": SHAPE, "index": INDEX},  # grad at the indices
    "IndexFillBackward0": {"index": INDEX},  # grad outside of the indices
    "IndexFillBackward1": {"index": INDEX},  # grad outside of the indices
    "IndexPutBackward0": {"indices": INDEX},  # grad at the indices
    # a reduction decides, see `_reduction`:
    "IndexReduceBackward0": {
        "self": SINGULAR,
        "source": SINGULAR,
        "result": SINGULAR,
        "index": INDEX,
    },
    "IndexSelectBackward0": {"index": INDEX},  # grad to the indices
    "IndexBackward0": {"indices": INDEX},  # grad to the indices
    "KthvalueBackward0": {"indices": INDEX},  # grad to the indices
    "MaskedFillBackward0": {"mask": INDEX},  # grad outside of the mask
    "MaskedFillBackward1": {"mask": INDEX},  # grad outside of the mask
    "MaskedScatterBackward0": {"mask": INDEX},  # grad at the mask
    "MaskedSelectBackward0": {"self": SHAPE, "mask": INDEX},  # grad to the mask
    "MaxBackward0": {"indices": INDEX},  # grad to the indices
    "MedianBackward1": {"indices": INDEX},  # grad to the indices
    "MinBackward0": {"indices": INDEX},  # grad to the indices
    "ModeBackward0": {"indices": INDEX},  # grad to the indices
    "NanmedianBackward1": {"indices": INDEX},  # grad to the indices
    "NativeDropoutBackward0": {"result1": INDEX},  # grad scale where the mask is set
    "NativeDropoutBackwardBackward0": {"grad_output": SHAPE, "mask": INDEX},  # as native_dropout
    "PutBackward0": {"source": SHAPE, "index": INDEX},  # grad at the indices
    "ScatterAddBackward0": {"index": INDEX},  # grad at the indices
    # a reduction decides, see `_reduction`:
    "ScatterReduceBackward0": {
        "self": SINGULAR,
        "src": SINGULAR,
        "result": SINGULAR,
        "index": INDEX,
    },
    "ScatterBackward0": {"index": INDEX},  # grad at the indices
    "ScatterBackward1": {"index": INDEX},  # grad outside of the indices
    # a reduction decides, see `_reduction`:
    "SegmentReduceBackward0": {
        "data": SINGULAR,
        "result": SINGULAR,
        "lengths": INDEX,
        "offsets": INDEX,
    },
    "SortBackward0": {"indices": INDEX},  # grad to the indices
    "SortBackward1": {"indices": INDEX},  # grad to the indices
    "TakeBackward0": {"self": SHAPE, "index": INDEX},  # grad to the indices
    "TopkBackward0": {"indices": INDEX},  # grad to the indices
    "UnsafeMaskedIndexBackward0": {"indices": INDEX, "mask": INDEX},  # grad to the indices
    # of its inputs, grad at the indices:
    "UnsafeMaskedIndexPutAccumulateBackward0": {"indices": INDEX, "mask": INDEX},
    "WhereBackward0": {"condition": INDEX},  # grad on either side
}
_POWER, _MAX_POWER = "PowBackward0", 8
_ROUNDED = "DivBackward2"
# Nodes of ours -> the torch node whose formula it is, and the field whose row they follow.
OURS = {
    "_LogProbabilitiesBackward": ("LogSoftmaxBackward0", "result"),
    "_LogitsBackward": ("LogSoftmaxBackward0", "result"),
    "_ProbabilitiesBackward": ("SoftmaxBackward0", "result"),
    "_PReLUBackward": ("LinearBackward0", "input"),  # x, for the weight's gradient
    "_ProductBackward": ("MulBackward0", "self"),
    "_ScaleRowsBackward": ("MulBackward0", "self"),
}
# Norms -> where the node has their exponent.
LENGTHS = {
    "LinalgVectorNormBackward0": "_saved_ord",
    "NormBackward0": "_saved_p",
    "NormBackward1": "_saved_p",
}
_REDUCTIONS = ("IndexReduceBackward0", "ScatterReduceBackward0", "SegmentReduceBackward0")


def formula_of(node: object, name: str, field: str) -> Formula:
    """Returns how the node of this name uses the tensor that it has saved under `field`.

    node: the node itself, which has the exponent of a power or norm if that is a number, and the
    name of a reduction.
    """
    if name == _POWER and field == "self":
        return _power(getattr(node, "_saved_exponent", None))
    if name in LENGTHS and field == "self":
        return _length(getattr(node, LENGTHS[name], None))
    if name == _ROUNDED:
        return _quotient(getattr(node, "_saved_rounding_mode", None))
    known, column = OURS.get(name, (name, field))
    formula = FORMULAS.get(known, {}).get(column, Formula.UNKNOWN)
    if name in _REDUCTIONS and formula is Formula.SINGULAR:
        return _reduction(getattr(node, "_saved_reduce", None))
    return formula


def _power(exponent: object) -> Formula:
    """grad * exponent * self^(exponent - 1): linear for a square, and smooth for larger ones.

    A relative error of `self` is one of (exponent - 1) times its size.
    """
    if not isinstance(exponent, int | float) or not isfinite(exponent):
        return Formula.SINGULAR
    if exponent != int(exponent) or exponent < 1:
        return Formula.RELATIVE if abs(exponent - 1) <= _MAX_POWER else Formula.SINGULAR
    return Formula.PRODUCT if exponent <= 2 else Formula.CURVED


def _quotient(rounding_mode: object) -> Formula:
    """Returns how a quotient is read: its gradient is zero where a mode rounds it."""
    return Formula.RELATIVE if rounding_mode is None else Formula.SHAPE


def _length(exponent: object) -> Formula:
    """grad self / result if the exponent is 2: linear in what is not divided by."""
    return Formula.PRODUCT if exponent == 2 else Formula.SINGULAR


def reduced_by(node: object, x: Tensor) -> tuple[int, ...]:
    """The dimensions of x over which a node computes a norm or a variance.

    Returns () for other nodes, which do not tell, and for a tensor that has none.
    """
    if not (x.dim() and hasattr(node, "_saved_dim")):
        return ()
    dims = node._saved_dim or range(x.dim())
    return tuple(sorted(_signed(d) % x.dim() for d in dims))


def normalized_by(node: object, x: Tensor) -> tuple[int, ...]:
    """The dimension of x along which a node of torch's own has made log-probabilities.

    Returns () for other nodes, which do not tell, and for a tensor that has none.
    """
    dim = getattr(node, "_saved_dim", None)
    return (_signed(dim) % x.dim(),) if isinstance(dim, int) and x.dim() else ()


def _signed(dim: int) -> int:
    """A dimension that autograd shows without its sign."""
    return dim - (1 << 64) if dim >= 1 << 63 else dim


def _reduction(name: object) -> Formula:
    """A sum or mean goes by indices, an extreme to what equals it; a product is divided by."""
    if name in ("sum", "mean"):
        return Formula.SHAPE
    return Formula.COMPARED if name in ("amax", "amin", "max", "min") else Formula.SINGULAR


# Nodes that save what most often becomes the size of a row, which is then divided by.
SIZES = frozenset(
    (
        *("PowBackward0", "FusedRmsNormBackward0", "VarBackward0", "VarMeanBackward0"),
        *("StdBackward0", "StdMeanBackward0", *LENGTHS),
    )
)
INVERSES = ("RsqrtBackward", "ReciprocalBackward", "PowBackward")

WHY = {
    Formula.SHAPE: "",
    Formula.COMPARED: "its order or sign decides where gradients flow",
    Formula.PERIODIC: "its backward takes a sine of it, and its range may be many turns",
    Formula.SINGULAR: "its backward divides by it, or by a root or logarithm of it",
    Formula.RELATIVE: "its backward divides by it, or by a root or logarithm of it",
    Formula.DIFFERENCE: "its backward reads a difference of it, which may be far smaller",
    Formula.STATISTIC: "a weight or statistic, which every element depends on",
    Formula.INDEX: "its backward selects by it",
    Formula.UNKNOWN: "no derivative formula of it is known",
}
