"""Finding a NaN or Inf in staged rows, at a price well below that of gathering them."""

import math

import numpy as np
import torch

_BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}
_INFINITY_BITS = {
    dtype: int(torch.tensor(math.inf, dtype=dtype).view(bits).item())
    for dtype, bits in _BITS.items()
}


def first_nonfinite(rows: torch.Tensor) -> tuple[int, int, float] | None:
    """(row, column, value) of the first NaN or Inf in `rows` [n, L, H]; None when all are finite.

    `rows` is contiguous, in host memory and of a dtype that can be stored; nothing of its size is
    allocated. The first is the one of the lowest row, then of the lowest column.
    """
    infinity = _INFINITY_BITS[rows.dtype]
    bits = rows.view(_BITS[rows.dtype]).numpy()
    if _all_finite(bits, infinity):
        return None
    row = next(n for n, columns in enumerate(bits) if not _all_finite(columns, infinity))
    column = next(n for n, states in enumerate(bits[row]) if not _all_finite(states, infinity))
    values = rows[row, column]  # [H]
    return row, column, float(values[~torch.isfinite(values)][0])


def _all_finite(bits: np.ndarray, infinity: int) -> bool:
    """Whether no float is as large as `infinity`, the bits of +Inf; `bits` is their signed view.

    Among floats of one sign the larger magnitude is the larger integer, with Inf and then NaN at
    the top. Read as signed, the positive floats are the large integers; as unsigned, the negative
    ones. So two maxima are exact, and numpy takes them at the speed of memory on this one thread:
    torch.isfinite(rows).all() takes 20 to 50 times as long, on threads that the model needs.
    """
    minus_infinity = infinity | 1 << (8 * bits.itemsize - 1)
    if bits.max() >= infinity:
        return False
    return bool(bits.view(f"u{bits.dtype}").max() < minus_infinity)
