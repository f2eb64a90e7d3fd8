"""Vector code for the CPU, written as LLVM IR through numba's intrinsics.

numba compiles scalar Python loops; for matrix kernels we want to say ourselves which vectors live in
registers. `Emitter` is the small vocabulary for that. Everything is plain LLVM (no instruction of one
processor), so the same kernels compile for AVX2, AVX-512 and NEON; only widths and tile sizes differ.

Arithmetic is spelled out (explicit fma, fixed order), never left to a vectoriser: a value computed in a
tile of one row has the same bits as in a tile of six.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from finback.kernels import cpu_features

LANES: Final = cpu_features.chosen().lanes
"""float32 values in a vector."""

COLUMN_VECTORS: Final = 2
"""Vectors that a matrix tile is wide."""

MAX_TILE_ROWS: Final = 12 if LANES == 16 else 6
"""Rows of the largest matrix tile: accumulators must fit 32 or 16 registers."""

F32: Final = ir.FloatType()
F16: Final = ir.HalfType()
I8: Final = ir.IntType(8)
I16: Final = ir.IntType(16)
I32: Final = ir.IntType(32)
I64: Final = ir.IntType(64)

# exp(r) for |r| <= ln(2) / 2, from Cephes' expf; relative error about 1e-7.
_EXP_COEFFICIENTS: Final = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_LOG2_E: Final = 1.44269504088896341
_LN2_HIGH: Final = 0.693359375
_LN2_LOW: Final = -2.12194440e-4

# log(m) for sqrt(1/2) <= m < sqrt(2), from Cephes' logf.
_LOG_COEFFICIENTS: Final = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)

Value = Any
"""An LLVM value; llvmlite has no types."""


class Emitter:
    """Emits vector code at the builder's place. `lanes` float32 values a vector."""

    def __init__(self, builder: Any, lanes: int = LANES) -> None:
        self.b = builder
        self.lanes = lanes
        self.f32 = ir.VectorType(F32, lanes)
        self.i32 = ir.VectorType(I32, lanes)
        self.i64 = ir.VectorType(I64, lanes)

    def vector_of(self, item: Any) -> Any:
        """The vector type of `lanes` items."""
        return ir.VectorType(item, self.lanes)

    # -- constants

    def const(self, value: float) -> Value:
        """A vector of one float32."""
        return ir.Constant(self.f32, [float(_round_f32(value))] * self.lanes)

    def iconst(self, value: int) -> Value:
        """A vector of one int32."""
        return ir.Constant(self.i32, [_signed(value)] * self.lanes)

    def splat(self, scalar: Value) -> Value:
        """A scalar in all lanes."""
        kind = ir.VectorType(scalar.type, self.lanes)
        start = self.b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        zeros = ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes)
        return self.b.shuffle_vector(start, ir.Constant(kind, ir.Undefined), zeros)

    # -- memory; addresses are integers in bytes

    def load(self, address: Value, kind: Any, offset: int = 0, align: int = 1) -> Value:
        """Load a value of `kind` from address + offset."""
        where = self.b.add(address, I64(offset)) if offset else address
        return self.b.load(self.b.inttoptr(where, kind.as_pointer()), align=align)

    def store(self, value: Value, address: Value, offset: int = 0, align: int = 1) -> None:
        """Store a value to address + offset."""
        where = self.b.add(address, I64(offset)) if offset else address
        self.b.store(value, self.b.inttoptr(where, value.type.as_pointer()), align=align)

    def load_f32(self, address: Value, offset: int = 0) -> Value:
        """A vector of float32."""
        return self.load(address, self.f32, offset)

    def load_f16(self, address: Value, offset: int = 0) -> Value:
        """A vector of float16, widened."""
        return self.b.fpext(self.load(address, self.vector_of(F16), offset), self.f32)

    def load_bf16(self, address: Value, offset: int = 0) -> Value:
        """A vector of bfloat16, widened."""
        raw = self.b.zext(self.load(address, self.vector_of(I16), offset), self.i32)
        return self.b.bitcast(self.b.shl(raw, self.iconst(16)), self.f32)

    def broadcast_f32(self, address: Value, offset: int = 0) -> Value:
        """One float32 in all lanes."""
        return self.splat(self.load(address, F32, offset))

    def prefetch(self, address: Value, offset: int = 0) -> None:
        """Ask for the cache line at address + offset in the second level; any address is allowed."""
        pointer = self.b.inttoptr(self.b.add(address, I64(offset)), I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
        function = cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0")
        self.b.call(function, [pointer, I32(0), I32(2), I32(1)])

    # -- arithmetic

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        return self.call(f"llvm.fma.v{self.lanes}f32", self.f32, a, b, c)

    def call(self, name: str, result: Any, *args: Value) -> Value:
        """Call an LLVM intrinsic or C function by name."""
        function = cgutils.get_or_insert_function(
            self.b.module, ir.FunctionType(result, [a.type for a in args]), name
        )
        return self.b.call(function, args)

    def unary(self, name: str, a: Value) -> Value:
        """An LLVM intrinsic of one vector, such as "floor", "rint", "sqrt", "fabs"."""
        return self.call(f"llvm.{name}.v{self.lanes}f32", self.f32, a)

    def maximum(self, a: Value, b: Value) -> Value:
        """Elementwise; the second operand where one is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def minimum(self, a: Value, b: Value) -> Value:
        """Elementwise; the second operand where one is NaN."""
        return self.b.select(self.b.fcmp_ordered("<", a, b), a, b)

    def exp(self, a: Value) -> Value:
        """exp; 0 below -87.3 (no denormals), inf above 88.3, NaN stays NaN."""
        low = self.b.fcmp_ordered("<", a, self.const(-87.3))
        x = self.b.select(low, self.const(0.0), a)
        high = self.b.fcmp_ordered(">", a, self.const(88.3))
        x = self.b.select(high, self.const(0.0), x)
        n = self.unary("floor", self.fma(x, self.const(_LOG2_E), self.const(0.5)))
        r = self.fma(n, self.const(-_LN2_HIGH), x)
        r = self.fma(n, self.const(-_LN2_LOW), r)
        poly = self.const(_EXP_COEFFICIENTS[0])
        for coefficient in _EXP_COEFFICIENTS[1:]:
            poly = self.fma(poly, r, self.const(coefficient))
        value = self.fma(self.b.fmul(r, r), poly, self.b.fadd(r, self.const(1.0)))
        # n is at most 127 here, so the scale is a normal number.
        power = self.b.shl(self.b.add(self._to_int(n), self.iconst(127)), self.iconst(23))
        result = self.b.fmul(value, self.b.bitcast(power, self.f32))
        result = self.b.select(high, self.const(float("inf")), result)
        return self.b.select(low, self.const(0.0), result)

    def log(self, a: Value) -> Value:
        """log of positive normal numbers."""
        bits = self.b.bitcast(a, self.i32)
        # Bring the mantissa to [sqrt(1/2), sqrt(2)).
        shifted = self.b.sub(bits, self.iconst(0x3F3504F3))
        exponent = self.b.sitofp(self.b.ashr(shifted, self.iconst(23)), self.f32)
        mantissa_bits = self.b.add(
            self.b.and_(shifted, self.iconst(0x7FFFFF)), self.iconst(0x3F3504F3)
        )
        m = self.b.fsub(self.b.bitcast(mantissa_bits, self.f32), self.const(1.0))
        poly = self.const(_LOG_COEFFICIENTS[0])
        for coefficient in _LOG_COEFFICIENTS[1:]:
            poly = self.fma(poly, m, self.const(coefficient))
        square = self.b.fmul(m, m)
        result = self.b.fmul(self.b.fmul(poly, m), square)
        result = self.fma(exponent, self.const(_LN2_LOW), result)
        result = self.fma(square, self.const(-0.5), result)
        return self.fma(exponent, self.const(_LN2_HIGH), self.b.fadd(m, result))

    def _to_int(self, a: Value) -> Value:
        """To int32, of values known to be in range; NaN must not trap, so it becomes 0."""
        safe = self.b.select(self.b.fcmp_ordered("ord", a, a), a, self.const(0.0))
        return self.b.fptosi(safe, self.i32)

    def reduce(self, a: Value, op: Callable[[Value, Value], Value]) -> Value:
        """All lanes into one scalar, in a fixed order (halves folded)."""
        width = self.lanes
        undefined = ir.Constant(a.type, ir.Undefined)
        while width > 1:
            width //= 2
            order = [i + width if i < width else 0 for i in range(self.lanes)]
            mask = ir.Constant(ir.VectorType(I32, self.lanes), order)
            a = op(a, self.b.shuffle_vector(a, undefined, mask))
        return self.b.extract_element(a, I32(0))

    def any_lane(self, flags: Value) -> Value:
        """Is any of a vector of booleans set?"""
        bits = self.b.bitcast(flags, ir.IntType(self.lanes))
        return self.b.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    def scalar_maximum(self, a: Value, b: Value) -> Value:
        """`maximum`, for `reduce`."""
        return self.maximum(a, b)

    def sum(self, a: Value) -> Value:
        """The sum of all lanes."""
        return self.reduce(a, self.b.fadd)

    # -- conversions and bits

    def to_f16(self, value: Value) -> Value:
        """Rounded to float16, kept finite; NaN stays NaN."""
        limit = self.const(65504.0)
        bounded = self.minimum(self.maximum(value, self.b.fneg(limit)), limit)
        # The comparisons above would hide a NaN.
        kept = self.b.select(self.b.fcmp_unordered("uno", value, value), value, bounded)
        return self.b.fptrunc(kept, self.vector_of(F16))

    def to_bf16(self, value: Value) -> Value:
        """Rounded to the nearest bfloat16, ties to even, as int16; NaN stays NaN."""
        bits = self.b.bitcast(value, self.i32)
        odd = self.b.and_(self.b.lshr(bits, self.iconst(16)), self.iconst(1))
        bias = self.b.add(odd, self.iconst(0x7FFF))
        rounded = self.b.lshr(self.b.add(bits, bias), self.iconst(16))
        quiet = self.b.or_(self.b.lshr(bits, self.iconst(16)), self.iconst(0x40))
        kept = self.b.select(self.b.fcmp_unordered("uno", value, value), quiet, rounded)
        return self.b.trunc(kept, self.vector_of(I16))

    def small_number(self, bits: Value) -> Value:
        """The low four bits of each int32 as float32."""
        if self.lanes == 16 and cpu_features.chosen().has_permute:
            # One look-up in a register instead of a mask and a conversion.
            table = ir.Constant(self.f32, [float(i) for i in range(16)])
            return self.call("llvm.x86.avx512.permvar.sf.512", self.f32, table, bits)
        return self.b.uitofp(self.b.and_(bits, self.iconst(15)), self.f32)

    def lane_numbers(self) -> Value:
        """0, 1, ... as int32."""
        return ir.Constant(self.i32, list(range(self.lanes)))

    def f32_of_bits(self, bits: Value) -> Value:
        """A scalar float32 from the low half of an int64."""
        return self.b.bitcast(self.b.trunc(bits, I32), F32)

    # -- control

    def variable(self, value: Value) -> Value:
        """A mutable place that starts with `value`; LLVM turns it into a register."""
        place = cgutils.alloca_once(self.b, value.type)
        self.b.store(value, place)
        return place

    @contextmanager
    def loop(self, count: Value) -> Iterator[Value]:
        """A loop over 0 .. count - 1 (int64)."""
        with cgutils.for_range(self.b, count, intp=I64) as state:
            yield state.index

    @contextmanager
    def cases(self, value: Value, highest: int) -> Iterator[Iterator[tuple[int, Any]]]:
        """Branches for value = 1 .. highest; any other value does nothing."""
        end = self.b.append_basic_block("cases_end")
        switch = self.b.switch(value, end)

        def branches() -> Iterator[tuple[int, Any]]:
            for number in range(1, highest + 1):
                block = self.b.append_basic_block(f"case_{number}")
                switch.add_case(I64(number), block)
                yield number, self._branch(block, end)

        yield branches()
        self.b.position_at_end(end)

    @contextmanager
    def _branch(self, block: Any, end: Any) -> Iterator[None]:
        self.b.position_at_end(block)
        yield
        self.b.branch(end)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _round_f32(value: float) -> float:
    """llvmlite prints float constants exactly only if they are float32 values."""
    import struct

    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def kernel(emit: Callable[..., None], name: str = "") -> Any:
    """A function for compiled code, called with one tuple of int64 (addresses, counts, strides).

    `emit(emitter, *values)` writes its body; it returns nothing. The body becomes one LLVM function
    that is never inlined, so that it is compiled once however often it is called. `name` must tell
    kernels of one `emit` apart.
    """
    symbol = f"finback_{emit.__module__}_{emit.__qualname__}_{name}".replace(".", "_")
    symbol = "".join(char if char.isalnum() else "_" for char in symbol)

    def define(module: Any, num_args: int) -> Any:
        if symbol in module.globals:
            return module.globals[symbol]
        kind = ir.FunctionType(ir.VoidType(), [I64] * num_args)
        function = ir.Function(module, kind, symbol)
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        emit(Emitter(builder), *function.args)
        builder.ret_void()
        return function

    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def call(typingctx: Any, values: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Sequence[Value]) -> Value:
            numbers = cgutils.unpack_tuple(builder, args[0])
            casted = [
                context.cast(builder, number, kind, types.int64)
                for number, kind in zip(numbers, signature.args[0], strict=True)
            ]
            builder.call(define(builder.module, len(casted)), casted)
            return context.get_dummy_value()

        return types.void(values), codegen

    return call
