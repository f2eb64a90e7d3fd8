"""Single machine operations for compiled code: memory words, atomics, waiting. Linux.

All addresses and values are int64.
"""

from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from finback.kernels.compiled import device_function

_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)

SPINS: Final = 4000
"""Looks at a flag before the processor is offered to others: some 20-50 microseconds."""

sem_init: Final = types.ExternalFunction(
    "sem_init", types.int32(types.intp, types.int32, types.uint32)
)
sem_post: Final = types.ExternalFunction("sem_post", types.int32(types.intp))
sem_trywait: Final = types.ExternalFunction("sem_trywait", types.int32(types.intp))
sem_wait: Final = types.ExternalFunction("sem_wait", types.int32(types.intp))
sched_yield: Final = types.ExternalFunction("sched_yield", types.int32())

SEMAPHORE_BYTES: Final = 64
"""Room for a sem_t (32 bytes on 64-bit Linux), a cache line."""


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def peek_i32(typingctx: Any, address: Any) -> Any:
    """The int32 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(builder.load(_pointer(builder, args[0], _I32), align=4), _I64)

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def peek_i64(typingctx: Any, address: Any) -> Any:
    """The int64 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], _I64), align=8)

    return types.int64(types.int64), codegen


def _peek_float(kind: Any, align: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def peek(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(_pointer(builder, args[0], kind), align=align)
            return builder.fpext(value, ir.DoubleType())

        return types.float64(types.int64), codegen

    return peek


peek_f32: Final = _peek_float(ir.FloatType(), 4)
peek_f16: Final = _peek_float(ir.HalfType(), 2)
"""A float at an address, widened to float64."""


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def peek_bf16(typingctx: Any, address: Any) -> Any:
    """The bfloat16 at an address, widened to float64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = builder.load(_pointer(builder, args[0], ir.IntType(16)), align=2)
        bits = builder.shl(builder.zext(half, _I32), _I32(16))
        return builder.fpext(builder.bitcast(bits, ir.FloatType()), ir.DoubleType())

    return types.float64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def peek_byte(typingctx: Any, address: Any) -> Any:
    """The byte at an address, 0 to 255."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.load(_pointer(builder, args[0], ir.IntType(8)), align=1), _I64)

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def poke_f32(typingctx: Any, address: Any, value: Any) -> Any:
    """Write a float, rounded to float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.fptrunc(args[1], ir.FloatType())
        builder.store(value, _pointer(builder, args[0], ir.FloatType()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float64), codegen


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def poke_i64(typingctx: Any, address: Any, value: Any) -> Any:
    """Write an int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = context.cast(builder, args[1], signature.args[1], types.int64)
        builder.store(value, _pointer(builder, args[0], _I64), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to an int64, return what was there; orders memory both ways."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0], _I64), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def atomic_load(typingctx: Any, address: Any) -> Any:
    """Read an int64; what others wrote before they set it is visible."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0], _I64), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def pause(typingctx: Any) -> Any:
    """Tell the processor that this is a waiting loop."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if builder.module.triple.startswith(("x86_64", "i686")):
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
            )
            builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def cycles(typingctx: Any) -> Any:
    """The processor's cycle counter."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_I64, []), "llvm.readcyclecounter"
        )
        return builder.call(function, [])

    return types.int64(), codegen


@device_function
def wait_for(address, value):  # type: ignore[no-untyped-def]  # compiled by numba
    """Until the int64 is at least `value`; polite when others need the processor."""
    spins = 0
    while atomic_load(address) < value:
        spins += 1
        if spins < SPINS:
            pause()
        else:
            sched_yield()


@device_function
def wait_for_equal(address, value):  # type: ignore[no-untyped-def]  # compiled by numba
    """Until the int64 is `value`."""
    spins = 0
    while atomic_load(address) != value:
        spins += 1
        if spins < SPINS:
            pause()
        else:
            sched_yield()
