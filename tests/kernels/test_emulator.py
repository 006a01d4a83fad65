"""The emulator itself: what instructions do, by hand-written PTX, and that it finds what it is there to find."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.emulator import Fault
from tests.kernels.emulator.formats import FORMATS
from tests.kernels.emulator.launch import Kernel
from tests.kernels.emulator.matrices import accumulate
from tests.kernels.emulator.memory import Argument
from tests.ops.battery import assert_as_precise

pytestmark = pytest.mark.emulated
THREADS = 64
HEADER = """
.visible .entry written(.param .u64 .ptr .global .align 16 written_param_0, .param .u64 written_param_1)
.reqntid {threads}
{{
	.reg .b32 	%r<100>;
	ld.param.b64 	%rd1, [written_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 4;
	add.s64 	%rd3, %rd1, %rd2;
	ld.global.b32 	{{ %r2 }}, [ %rd3 + 0 ];
{body}
	st.global.b32 	[ %rd3 + 0 ], {{ %r3 }};
	ret;
}}
"""


@pytest.fixture(autouse=True)
def _emulating(emulated: bool) -> None:
    if not emulated:
        pytest.skip("the emulator's own tests: needs --emulate")


def run(body: str, numbers: Tensor, shared: int = 0) -> Tensor:
    """Each thread has its index in %r1 and its number in %r2, and leaves a number in %r3."""
    lines = "\n".join(f"\t{line.strip()}" for line in body.strip().splitlines())
    kernel = Kernel(HEADER.format(threads=len(numbers), body=lines))
    found = numbers.clone()
    start = found.data_ptr()
    values = [start.to_bytes(8, "little")]
    kernel.launch((1, 1, 1), values, [Argument(start, start + found.numel() * 4, "numbers")], shared)
    return found


def integers(*special: int) -> Tensor:
    """Positive and negative ones of every size, the `special` ones first."""
    drawn = np.random.default_rng(0).integers(-(2**31), 2**31, THREADS)
    drawn >>= np.arange(THREADS) % 31
    drawn[: len(special)] = special
    return torch.from_numpy(drawn.astype(np.int32))


UPPER_HALF = "shr.u64 %rd6, %rd5, 32;\ncvt.u32.u64 %r3, %rd6;"
PACKED = """
    cvt.rn.f16x2.f32 %r4, 0f3F800000, %r2;
    fma.rn.f16x2 %r5, %r4, %r4, %r4;
    cvt.u16.u32 %rs1, %r5;
    cvt.f32.f16 %r3, %rs1;
"""


def truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def permuted(x: int, y: int, selector: int) -> int:
    eight = struct.pack("<ii", x, y)
    made = b""
    for digit in reversed(f"{selector:04x}"):
        sign, place = divmod(int(digit, 16), 8)
        byte = eight[place]
        made += bytes([255 if byte > 127 else 0]) if sign else bytes([byte])
    return struct.unpack("<i", made)[0]


@pytest.mark.parametrize(
    ("instruction", "formula"),
    [
        ("add.s32 %r3, %r2, -7;", lambda x, i: x - 7),
        ("sub.s32 %r3, %r1, %r2;", lambda x, i: i - x),
        ("mul.lo.s32 %r3, %r2, %r2;", lambda x, i: x * x),
        ("mad.lo.s32 %r3, %r2, 3, %r1;", lambda x, i: 3 * x + i),
        ("neg.s32 %r3, %r2;", lambda x, i: -x),
        ("div.s32 %r3, %r2, 7;", lambda x, i: truncated(x, 7)),
        ("div.s32 %r3, %r2, -7;", lambda x, i: truncated(x, -7)),
        ("rem.s32 %r3, %r2, 7;", lambda x, i: x - 7 * truncated(x, 7)),
        ("div.u32 %r3, %r2, 7;", lambda x, i: (x & 0xFFFFFFFF) // 7),
        ("max.s32 %r3, %r2, %r1;", max),
        ("min.s32 %r3, %r2, %r1;", min),
        ("min.relu.s32 %r3, %r2, %r1;", lambda x, i: max(0, min(x, i))),
        ("shl.b32 %r3, %r2, 5;", lambda x, i: x << 5),
        ("shr.s32 %r3, %r2, 5;", lambda x, i: x >> 5),
        ("shr.u32 %r3, %r2, 5;", lambda x, i: (x & 0xFFFFFFFF) >> 5),
        ("shl.b32 %r3, %r2, %r1;", lambda x, i: x << i if i < 32 else 0),
        ("shr.s32 %r3, %r2, %r1;", lambda x, i: x >> i),
        ("shr.u32 %r3, %r2, %r1;", lambda x, i: (x & 0xFFFFFFFF) >> i),
        ("bfi.b32 %r3, %r2, %r1, 8, 4;", lambda x, i: (x & 15) << 8 | i & ~0xF00),
        ("bfi.b32 %r3, %r1, %r2, 0, 32;", lambda x, i: i),
        ("bfe.u32 %r3, %r2, 3, 9;", lambda x, i: x >> 3 & 511),
        ("bfe.s32 %r3, %r2, 3, 9;", lambda x, i: (x >> 3 & 511) - (512 if x >> 11 & 1 else 0)),
        ("and.b32 %r3, %r2, %r1;", lambda x, i: x & i),
        ("xor.b32 %r3, %r2, -2;", lambda x, i: x ^ -2),
        ("prmt.b32 %r3, %r2, %r1, 0x5410U;", lambda x, i: permuted(x, i, 0x5410)),
        ("prmt.b32 %r3, %r2, %r1, 0x3B0F;", lambda x, i: permuted(x, i, 0x3B0F)),
        ("prmt.b32 %r3, %r2, %r1, %r1;", lambda x, i: permuted(x, i, i)),
        ("setp.lt.s32 %p1, %r2, %r1;\nselp.b32 %r3, %r1, -5, %p1;", lambda x, i: i if x < i else -5),
        ("setp.lt.u32 %p1, %r2, %r1;\nselp.b32 %r3, %r1, -5, %p1;", lambda x, i: i if 0 <= x < i else -5),
        ("mul.wide.s32 %rd5, %r2, 70000;" + UPPER_HALF, lambda x, i: x * 70000 >> 32),
        ("cvt.s64.s32 %rd4, %r2;\nshl.b64 %rd5, %rd4, 12;" + UPPER_HALF, lambda x, i: x >> 20),
        ("mov.b32 {%rs1, %rs2}, %r2;\nmov.b32 %r3, {%rs2, %rs1};", lambda x, i: x >> 16 & 0xFFFF | (x & 0xFFFF) << 16),
        ("mov.b32 {_, %rs2}, %r2;\ncvt.u32.u16 %r3, %rs2;", lambda x, i: x >> 16 & 0xFFFF),
    ],
)  # fmt: skip
def test_integers(instruction: str, formula: Callable[[int, int], int]) -> None:
    numbers = integers(0, 1, -1, 7, -7, 2**31 - 1, -(2**31))
    expected = [(formula(int(x), i) + 2**31) % 2**32 - 2**31 for i, x in enumerate(numbers)]
    assert run(instruction, numbers).tolist() == expected


def floats() -> Tensor:
    drawn = torch.randn(THREADS, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, THREADS)
    drawn[:6] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0])
    return drawn


@pytest.mark.parametrize(
    ("instruction", "formula"),
    [
        ("add.f32 %r3, %r2, 0f3FC00000;", lambda x: x + 1.5),
        ("fma.rn.f32 %r3, %r2, %r2, 0fBF800000;", lambda x: (x.double() ** 2 - 1).float()),
        ("div.full.f32 %r3, 0f3F800000, %r2;", lambda x: 1 / x),
        ("ex2.approx.f32 %r3, %r2;", lambda x: torch.exp2(x)),
        ("sqrt.rn.f32 %r3, %r2;", lambda x: x.sqrt()),
        ("neg.f32 %r3, %r2;", lambda x: -x),
        ("abs.f32 %r3, %r2;", abs),
        # Beside NaN the other one.
        ("max.f32 %r3, %r2, 0f3F800000;", lambda x: torch.fmax(x, torch.ones(()))),
        ("min.f32 %r3, %r2, 0f3F800000, 0f00000000;", lambda x: torch.fmin(x, torch.zeros(()))),
        ("cvt.rn.f16.f32 %rs1, %r2;\ncvt.f32.f16 %r3, %rs1;", lambda x: x.half().float()),
        ("cvt.rn.bf16.f32 %rs1, %r2;\ncvt.f32.bf16 %r3, %rs1;", lambda x: x.bfloat16().float()),
        ("cvt.rn.bf16x2.f32 %r4, %r2, %r1;\nand.b32 %r3, %r4, 0xffff0000;", lambda x: x.bfloat16().float()),
        (PACKED, lambda x: (x.half().float() ** 2 + x.half().float()).half().float()),
        *((f"setp.{name}.f32 %p1, %r2, 0f3F800000;\nselp.f32 %r3, 0f40000000, 0f00000000, %p1;",
           lambda x, compare=compare, nan=nan: 2.0 * torch.where(torch.isnan(x), torch.tensor(nan), compare(x, 1.0)))
          for name, compare, nan in (("eq", torch.eq, False), ("ne", torch.ne, False), ("neu", torch.ne, True),
                                     ("equ", torch.eq, True), ("lt", torch.lt, False), ("geu", torch.ge, True))),
        # Each thread with its neighbor.
        ("shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;", lambda x: x.view(-1, 2).flip(1).reshape(-1)),
        ("shfl.sync.idx.b32 %r3, %r2, 3, 31, -1;", lambda x: x.view(-1, 32)[:, 3:4].expand(-1, 32).reshape(-1)),
    ],
)  # fmt: skip
def test_floats(instruction: str, formula: Callable[[Tensor], Tensor]) -> None:
    numbers = floats()
    found = run(instruction, numbers)
    torch.testing.assert_close(found, formula(numbers), rtol=3e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_a_float_becomes_a_whole_number_towards_zero(kind: str) -> None:
    numbers = floats()
    numbers[6:10] = torch.tensor([-1.99, 1.99, 3e9, -3e9])
    low, high = (-(2**31), 2**31 - 1) if kind == "s32" else (0, 2**32 - 1)
    expected = numbers.double().nan_to_num(0.0).trunc().clamp(low, high).to(torch.int64)
    found = run(f"cvt.rzi.{kind}.f32 %r3, %r2;", numbers).view(torch.int32).to(torch.int64)
    assert torch.equal(found if kind == "s32" else found % 2**32, expected)


@pytest.mark.parametrize(("name", "narrow"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_narrow_numbers_are_torchs(name: str, narrow: torch.dtype) -> None:
    every = np.arange(2**16, dtype=np.uint16)
    wide = torch.from_numpy(every.view(np.int16).copy()).view(narrow).float()
    assert np.array_equal(FORMATS[name].read(every), wide.numpy(), equal_nan=True)
    # Between two of them, at the middle and beside it.
    several = torch.cat([wide, wide * 1.001, (wide[:-1] + wide[1:]) / 2])
    given = FORMATS[name].read(FORMATS[name].write(several.numpy()))
    assert np.array_equal(given, several.to(narrow).float().numpy(), equal_nan=True)


# Ways that part and meet

PARTING = """
	mov.b32 	%r3, 0;
	and.b32 	%r4, %r1, 3;
	setp.eq.b32 	%p1, %r4, 0;
	@%p1 bra 	$L__end;
$L__loop:
	add.s32 	%r3, %r3, %r2;
	add.s32 	%r4, %r4, -1;
	setp.gt.s32 	%p2, %r4, 0;
	@%p2 bra 	$L__loop;
	setp.lt.s32 	%p3, %r1, 40;
	@!%p3 bra 	$L__end;
	add.s32 	%r3, %r3, 1000;
$L__end:
	shfl.sync.idx.b32 	%r5, %r3, 2, 31, -1;
	add.s32 	%r3, %r3, %r5;
"""


def test_threads_part_and_meet_again() -> None:
    numbers = integers()
    index = torch.arange(THREADS, dtype=torch.int32)
    alone = numbers * (index % 4) + 1000 * ((index < 40) & (index % 4 != 0))
    together = alone + alone.view(-1, 32)[:, 2:3].expand(-1, 32).reshape(-1)
    assert torch.equal(run(PARTING, numbers), together.int())


# What is to be found

EXCHANGE = """
	shl.b32 	%r4, %r1, 2;
	mov.b32 	%r5, global_smem;
	add.s32 	%r6, %r5, %r4;
	st.shared.b32 	[%r6], %r2;
	{barrier}
	xor.b32 	%r7, %r4, {other};
	add.s32 	%r8, %r5, %r7;
	ld.shared.b32 	%r3, [%r8];
"""


def test_a_race_in_shared_memory() -> None:
    numbers = integers()
    # With the thread of the other warp; with one of the same warp, which needs no barrier.
    assert torch.equal(run(EXCHANGE.format(barrier="bar.sync 0;", other=128), numbers, 256), numbers.roll(32))
    assert torch.equal(run(EXCHANGE.format(barrier="", other=4), numbers, 256), numbers.view(-1, 2).flip(1).reshape(-1))
    with pytest.raises(Fault, match="load of what another warp writes, without a barrier"):
        run(EXCHANGE.format(barrier="", other=128), numbers, 256)
    again = EXCHANGE.format(barrier="bar.sync 0;", other=128) + "\n\tst.shared.b32 \t[%r6], %r3;"
    with pytest.raises(Fault, match="store over what another warp reads"):
        run(again, numbers, 256)
    with pytest.raises(Fault, match="of 256 bytes of shared memory"):
        run(EXCHANGE.format(barrier="bar.sync 0;", other=256), numbers, 256)


COPY = """
	shl.b32 	%r4, %r1, 2;
	mov.b32 	%r5, global_smem;
	add.s32 	%r6, %r5, %r4;
	cp.async.ca.shared.global 	[ %r6 + 0 ], [ %rd3 + 0 ], 0x4;
	cp.async.commit_group;
	cp.async.ca.shared.global 	[ %r6 + 256 ], [ %rd1 + 0 ], 0x4, 0;
	cp.async.commit_group;
	cp.async.wait_group 	{left};
	ld.shared.b32 	%r3, [%r6];
	ld.shared.b32 	%r7, [%r6+256];
	add.s32 	%r3, %r3, %r7;
"""


def test_a_copy_is_there_when_it_was_waited_for() -> None:
    numbers = integers()
    assert torch.equal(run(COPY.format(left=0), numbers, 512), numbers)
    # The later of the two, of zeros, still has the bits of −1.
    assert torch.equal(run(COPY.format(left=1), numbers, 512), numbers - 1)
    assert (run(COPY.format(left=2), numbers, 512) == -2).all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 { %r3 }, [ %rd3 + 4 ];", "load of 4 bytes outside of every argument: byte 256 of numbers"),
        ("ld.global.b32 { %r3 }, [ %rd3 + -4 ];", "outside of every argument: byte -4 of numbers"),
        ("ld.global.v4.b32 { %r3, %r4, %r5, %r6 }, [ %rd3 + 0 ];", "which 16 does not divide"),
        ("mov.b32 %r3, 0;\nst.global.b32 [ %rd1 + 0 ], { %r1 };", "store over what another warp reads or writes"),
        ("setp.lt.s32 %p1, %r1, 40;\nmov.b32 %r3, 0;\n@%p1 bra $L__x;\nbar.sync 0;\n$L__x:\n", "not all threads"),
        ("popc.b32 %r3, %r2;", "does not know 'popc.b32 %r3, %r2'"),
        ("@%p1 add.s32 %r3, %r2, 1;", "does not know a guarded"),
        ("max.NaN.f32 %r3, %r2, %r2;", "does not know NaN of"),
        ("bfe.u32 %r3, %r2, %r1, 8;", "does not know 'bfe.u32 %r3, %r2, %r1, 8'"),
    ],
)
def test_faults(body: str, message: str) -> None:
    with pytest.raises(Fault, match=message.replace("[", r"\[")):
        run(body, integers())


@triton.jit
def _exchanged(source, target, BARRIER: tl.constexpr):
    here = tl.arange(0, 128)
    tl.store(target + here, tl.load(source + here))
    if BARRIER:
        tl.debug_barrier()
    tl.store(target + 128 + here, tl.load(target + 127 - here))


@triton.jit
def _same_places(target):
    tl.store(target + tl.arange(0, 128), tl.program_id(0))


def test_a_race_in_global_memory() -> None:
    source, target = torch.arange(128.0), torch.empty(256)
    exchanged: Any = _exchanged
    exchanged[(1,)](source, target, True)
    assert torch.equal(target, torch.cat([source, source.flip(0)]))
    with pytest.raises(Fault, match="_exchanged: load of what another warp writes"):
        exchanged[(1,)](source, target, False)
    numbers = torch.empty(128, dtype=torch.int32)
    _same_places[(1,)](numbers)
    with pytest.raises(Fault, match="_same_places: store over what another warp"):
        _same_places[(2,)](numbers)


# Products, on whatever tensor cores the card has


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("before", "product", "expected"),
    [
        (1.0, 2.0**-24, 1 + 2.0**-21),  # eight of them at once, beside the 24 bits of the 1 and one more
        (1.0, 1.9 * 2.0**-25, 1.0),
        (1.0, 1.5 * 2.0**-24, 1 + 2.0**-21),
        (0.0, 1.5 * 2.0**-24, 12 * 2.0**-24),
        (1.0, -(2.0**-24), 1 - 2.0**-21),
        (2.0**24 - 1, 0.75, 2.0**24 + 2),  # 2²⁴ + 3 has 25 bits
        (2.0**24, 0.2, 2.0**24),
    ],
)
def test_tensor_cores_cut_off(before: float, product: float, expected: float, sign: int) -> None:
    left, right = np.full((1, 16), sign, np.float32), np.full((16, 1), product, np.float32)
    left[:, 8:] = 0
    assert accumulate(left, right, np.array([[sign * before]], np.float32)) == sign * expected


def test_what_is_not_finite_stays_in_its_row() -> None:
    left, right = np.ones((3, 16), np.float32), np.ones((16, 2), np.float32)
    left[1, 9], left[2, 3] = np.nan, np.inf
    found = accumulate(left, right, np.zeros((3, 2), np.float32))
    assert np.array_equal(found, [[16, 16], [np.nan, np.nan], [np.inf, np.inf]], equal_nan=True)


@triton.jit
def _product(
    left, right, result, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr,
    LEFT_TURNED: tl.constexpr, RIGHT_TURNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, column, k = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :], tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(STEPS):
        there = step * DEPTH + k
        if LEFT_TURNED:
            a = tl.trans(tl.load(left + there[:, None] * ROWS + tl.trans(row)))
        else:
            a = tl.load(left + row * DEPTH * STEPS + there[None, :])
        if RIGHT_TURNED:
            b = tl.trans(tl.load(right + tl.trans(column) * DEPTH * STEPS + there[None, :]))
        else:
            b = tl.load(right + there[:, None] * COLUMNS + column)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(result + row * COLUMNS + column, total)


@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(
    "shape", [(16, 16, 16), *(pytest.param(large, marks=pytest.mark.slow) for large in ((128, 64, 64), (64, 128, 32)))]
)
@pytest.mark.parametrize(
    ("narrow", "precision"),
    [(torch.float16, "ieee"), (torch.bfloat16, "ieee"), (torch.float32, "ieee"), (torch.float32, "tf32")],
)
def test_products(shape: tuple[int, int, int], turned: tuple[bool, bool], narrow: torch.dtype, precision: str) -> None:
    rows, columns, depth = shape
    made = torch.Generator().manual_seed(rows + columns)
    left, right = (torch.randn(size, generator=made).to(narrow) for size in ((rows, 3 * depth), (3 * depth, columns)))
    if precision == "tf32":
        # The cores cut off what TF32 has not.
        left, right = ((tensor.view(torch.int32) & -(2**13)).view(torch.float32) for tensor in (left, right))
    stored: list[Any] = [(x.mT if turn else x).contiguous() for x, turn in zip((left, right), turned, strict=True)]
    result = torch.empty(rows, columns)
    _product[(1,)](*stored, result, rows, columns, depth, 3, *turned, precision, num_stages=3)
    exact = left.double() @ right.double()
    epsilon = torch.finfo(torch.float32).eps
    terms = epsilon * (left.double().abs() @ right.double().abs())
    assert_as_precise("product", result, left.float() @ right.float(), exact, epsilon, [terms])
