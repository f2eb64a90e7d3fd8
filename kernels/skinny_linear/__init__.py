"""Op `skinny_linear`: a linear map of few rows with its neighbours fused into it.

`skinny_linear(x, weight, *, norm_weight, eps, residual, activation, out)` equals

    if norm_weight is not None: x = rms_norm(x, norm_weight, eps)
    y = x @ weight.T                       x [rows, in], weight [out, in], at most MAX_ROWS rows
    if activation == "silu_mul": y = silu(first half of y) * second half
    if residual is not None: y = residual + y

and writes y to `out` [rows, out] (or half as wide). `residual` may be `out` itself. Products are of
values rounded to the weight's type, summed in float32.
"""

from typing import Final, Literal

MAX_ROWS: Final = 16
Activation = Literal["none", "silu_mul"]
