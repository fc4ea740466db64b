"""Arrays over addresses, made inside compiled code.

A table of addresses stands for any number of tensors; an array argument each would be unpacked, and
counted, at every call. Such an array owns nothing: the caller keeps the tensor alive.
"""

from typing import Any

from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array


@intrinsic
def array_at(_typing: Any, address: Any, length: Any, dtype: Any) -> Any:
    """The `length` elements from `address` (int64) on, as an array of `dtype` (a NumPy class)."""
    kind = types.Array(dtype.dtype, 1, "C")

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = make_array(kind)(context, builder)
        element = context.get_data_type(kind.dtype)
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(element))
        populate_array(
            made,
            data=builder.inttoptr(args[0], element.as_pointer()),
            shape=[args[1]],
            strides=[itemsize],
            itemsize=itemsize,
            meminfo=None,
        )
        return made._getvalue()

    return kind(types.int64, types.int64, dtype), code
