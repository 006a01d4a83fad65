"""The choice of an implementation: global, for a block, nested, restored after errors, refused with the reason, and
what becomes of kernels that fail."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.checks import InputError
from cdt_fast.ops import common, products
from cdt_fast.ops.lista_step import lista_step_reference
from tests.ops.battery import OPERATORS, assert_equal, results, variant


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = common._setting
    yield
    common._setting = before


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops take this processor for a card that no kernel has run on."""
    pytest.importorskip("triton")
    reasons = {"unavailable_reason": None, "unsupported_reason": None, "dot_precision": "tf32"}
    for name, answer in {**reasons, "interpreting": False, "spec_of": common.SMALLEST}.items():
        monkeypatch.setattr(common, name, lambda *_, answer=answer: answer)
    for name in ("_worked", "_disabled"):
        monkeypatch.setattr(common, name, set())


def test_the_import_loads_neither_the_compiler_nor_triton() -> None:
    code = "import sys, cdt_fast.ops; assert not {'torch._dynamo', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_blocks_nest_and_restore_also_after_an_error() -> None:
    ops.use_backend("auto")
    with ops.use_backend("torch"):
        assert common._setting == "torch"
        assert common.explain() == "torch (chosen by use_backend)"
        with ops.use_backend("auto"):
            with ops.use_backend("torch"):
                pass
            assert common._setting == "auto"
        with pytest.raises(ZeroDivisionError), ops.use_backend("auto"):
            raise ZeroDivisionError
        assert common._setting == "torch"
    assert common._setting == "auto"


@pytest.mark.parametrize("name", ["cuda", "Torch", "", None, 1])
def test_unknown_names_are_refused_and_change_nothing(name: Any) -> None:
    ops.use_backend("torch")
    with pytest.raises(InputError, match=r"backend must be one of 'auto', 'triton', 'torch', got "):
        ops.use_backend(name)
    assert common._setting == "torch"


def test_triton_is_refused_with_the_reason_where_no_kernel_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "unavailable_reason", lambda: "the moon is in the way")
    ops.use_backend("auto")
    with pytest.raises(InputError, match=r"'triton' cannot be used here: the moon is in the way. 'auto' and 'torch' c"):
        ops.use_backend("triton")
    assert common._setting == "auto"
    assert common.explain() == "torch (the moon is in the way)"


def test_a_kernel_is_refused_with_the_first_reason_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "unavailable_reason", lambda: None)
    monkeypatch.setattr(common, "interpreting", lambda: True)
    tensor = torch.zeros(2, 3)
    with ops.use_backend("triton"):
        assert common.explain() == "triton (in its interpreter, on the CPU)"
        assert common.choose_backend("an_op", tensor) == "triton"
        for tensors in ((tensor.double(),), (tensor, tensor.double())):
            with pytest.raises(InputError, match=r"cannot run an_op here: .* not in float64"):
                common.choose_backend("an_op", *tensors)
        with pytest.raises(InputError, match="the tensors are on meta and the kernels run on cpu"):
            common.choose_backend("an_op", tensor.to("meta"))
    with ops.use_backend("auto"):
        assert common.explain().startswith("triton")
        assert common.choose_backend("an_op", tensor.double()) == "torch"
    with ops.use_backend("torch"):
        assert common.choose_backend("an_op", tensor) == "torch"


@pytest.mark.parametrize(("precision", "products"), [("tf32", "triton"), ("ieee", "torch")])
def test_float32_is_multiplied_by_kernels_only_on_tensor_cores(
    on_a_card: None, precision: str, products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.zeros(2, 3)
    monkeypatch.setattr(common, "dot_precision", lambda _: precision)
    with ops.use_backend("auto"):
        assert common.choose_backend("an_op", tensor, multiplies=True) == products
        assert common.choose_backend("an_op", tensor) == "triton"
        assert common.choose_backend("an_op", tensor.bfloat16(), multiplies=True) == "triton"
    with ops.use_backend("triton"):
        assert common.choose_backend("an_op", tensor, multiplies=True) == "triton"


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common.importlib.util, "find_spec", lambda name: None)
    assert "Triton is not installed" in str(common.unavailable_reason.__wrapped__())


@pytest.mark.parametrize(
    ("environment", "error", "words"),
    [  # without an error, Triton's own
        ({"PATH": ""}, None, "Failed to find C compiler.* To run them, install gcc, or set CC"),
        ({"CC": "false"}, None, "CalledProcessError: .* status 1. To .* if Python.h is missing, install python3-dev"),
        ({}, AssertionError("libcuda.so cannot found!\nrun ld"), "run ld. To run them, set TRITON_LIBCUDA_PATH"),
        ({}, PermissionError(13, "Permission denied", "/root/.triton"), "Permission denied.* set TRITON_CACHE_DIR"),
        ({}, ImportError("utils.so: failed to map segment"), "failed to map segment. To run them, set TRITON_CACHE"),
        ({}, RuntimeError("PTX compiled with an unsupported toolchain."), "toolchain. To run .* newer NVIDIA driver"),
        ({}, KeyError("nothing known"), "KeyError: 'nothing known'$"),
    ],
)
def test_a_first_launch_that_fails_leaves_plain_torch(
    on_a_card: None,
    environment: dict[str, str],
    error: Exception | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    # Triton 3.8 and later has its driver's source in a file.
    builder = next(name for name in ("compile_module_from_src", "compile_module_from_file") if hasattr(nvidia, name))
    calls, build = [], getattr(nvidia, builder)

    def compile_module(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if error is not None:
            raise error
        return build(*args, **options)

    # All is Triton's, up to what it compiles of its own for a driver that it believes to be there.
    monkeypatch.setattr(nvidia, builder, compile_module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("_default", "_active"):
        monkeypatch.setattr(driver, name, None)
    monkeypatch.delenv("CC", raising=False)
    for name, value in {"TRITON_LIBCUDA_PATH": "/", "TRITON_CACHE_DIR": str(tmp_path), **environment}.items():
        monkeypatch.setenv(name, value)
    step = torch.randn(3, 5), torch.randn(3, 4), torch.randn(4, 5)
    options: dict[str, Any] = {"step": 0.1, "threshold": 0.1}
    with ops.use_backend("triton"), pytest.raises(Exception) as raised:
        ops.lista_step(*step, **options)
    assert error is None or raised.value is error
    with ops.use_backend("auto"):
        with pytest.warns(RuntimeWarning, match=rf"lista_step runs .* in float32 on cpu: .*{words}") as warned:
            found = [ops.lista_step(*step, **options) for _ in range(2)]
        assert (len(warned), len(calls)) == (1, 2)
        torch.testing.assert_close(found, [lista_step_reference(*step, **options)] * 2)
        assert common.choose_backend("lista_step", step[0]) == "torch"
        for op, tensor in (("lista_step", step[0].half()), ("lista_step", step[0].to("meta")), ("an_op", step[0])):
            assert common.choose_backend(op, tensor) == "triton"


def test_only_the_compiler_is_forgiven_once_a_kernel_has_worked(on_a_card: None) -> None:
    def fail(error: Exception) -> None:
        with common.or_plain_torch("lista_step", torch.zeros(3)):
            raise error

    blamed = InputError(), TypeError("unexpected keyword"), torch.OutOfMemoryError(), RuntimeError("out of memory")
    for size in (0, 3):
        with common.or_plain_torch("lista_step", torch.zeros(size)):
            pass
        for error in (*blamed, *[RuntimeError("an illegal memory access was encountered")] * (size > 0)):
            with pytest.raises(type(error)):
                fail(error)
        assert len(common._worked) == (size > 0)
    with pytest.warns(RuntimeWarning, match="out of resource"):
        fail(RuntimeError("out of resource: shared memory"))


def test_plain_torch_takes_over_a_backward_that_does_not_fit(on_a_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from cdt_fast.kernels import symmetric_attention as kernels

    calls: list[str] = []

    def forward(z: Tensor, *_: Any) -> tuple[Tensor, Tensor, None]:
        calls.append("forward")
        scores = z @ z.mT
        return scores.softmax(-1) @ z, scores.logsumexp(-1), None

    def backward(*_: Any) -> Any:
        calls.append("backward")
        raise RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 101376")

    def attend() -> list[Tensor]:
        output = ops.symmetric_attention(z)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), z)]

    monkeypatch.setattr(kernels, "forward", forward)
    monkeypatch.setattr(kernels, "backward", backward)
    z = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with ops.use_backend("torch"):
        expected = attend()
    with ops.use_backend("triton"), pytest.raises(RuntimeError, match="out of resource"):
        attend()
    with ops.use_backend("auto"):
        with pytest.warns(RuntimeWarning, match="symmetric_attention runs on plain torch .* out of resource"):
            found = attend()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = attend()
    assert calls == ["forward", "backward"] * 2
    torch.testing.assert_close(found, expected)
    assert all(map(torch.equal, again, expected))


@pytest.mark.parametrize("name", [*OPERATORS, "denoising_layer"])
def test_plain_torch_takes_over_from_kernels_that_do_not_compile(
    on_a_card: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def fail(*arguments: Any, **_: Any) -> Any:
        calls.append(arguments)
        raise RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 101376")

    case = variant(name).to(torch.bfloat16)
    kernels = importlib.import_module(f"cdt_fast.kernels.{case.op}")
    for launcher in {"forward", "backward", "cross_entropy_"} & set(vars(kernels)):
        monkeypatch.setattr(kernels, launcher, fail)
    with pytest.warns(RuntimeWarning, match=rf"{case.op} runs on plain torch .* out of resource") as warned:
        found = results(case)
    assert len(warned) == 1
    assert len(calls) <= 2  # of all chunks, forward and backward
    with ops.use_backend("torch"):
        assert_equal(found, results(case))


@pytest.mark.parametrize(("widths", "fits"), [((40, 48, 64), True), ((64, 32, 64), False), ((225, 96, 225), False)])
def test_on_hopper_narrow_layers_are_composed_and_unaligned_tensors_copied(
    monkeypatch: pytest.MonkeyPatch, widths: tuple[int, int, int], fits: bool
) -> None:
    """ptxas 12.8 compiles them wrong there, and there alone."""
    module = importlib.import_module("cdt_fast.ops.unrolled_layer")
    given = 20, widths, torch.bfloat16, torch.device("cpu")
    memory = torch.arange(168, dtype=torch.bfloat16)
    signal, aligned = memory[3:163].view(1, 20, 8), memory[8:].view(1, 20, 8)
    for hopper in (False, True):
        monkeypatch.setattr(common, "is_hopper", lambda _, hopper=hopper: hopper)
        assert (module.unfused_reason(*given) is None) == (fits or not hopper)
        first, none, second = module.for_card(signal, None, aligned)
        assert (first is signal) == (not hopper)
        assert torch.equal(first, signal)
        assert none is None
        assert second is aligned


@pytest.mark.parametrize("rows", [7, 37])  # less and more than the widest matrix
@pytest.mark.parametrize("convolves", [False, True])
def test_products_of_rows_are_exact_by_convolutions_too(
    convolves: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_mkl_is_slow", lambda: convolves)
    monkeypatch.setattr(products, "LEAST_CONVOLVED", 1)
    monkeypatch.setattr(products, "NARROWEST_CONVOLVED", 1)
    monkeypatch.setitem(products.PRODUCT_BYTES, "cpu", 4 * 3 * 11)  # of sums: three rows at a time
    left, right, total = torch.randn(rows, 5), torch.randn(rows, 11), torch.randn(5, 11)
    matrix, added = torch.randn(11, 5).mT, torch.randn(rows, 11)
    calls = []
    monkeypatch.setattr(torch, "conv2d", lambda *args, of=torch.conv2d: calls.append(args) or of(*args))
    summed, turned, written = total.clone(), total.mT.contiguous().mT, torch.full_like(total, float("nan"))
    products.add_product(summed, left, right)
    products.add_product(turned, left, right)
    products.add_product(written, left, right, overwrite=True)
    wide, product = left.double().mT @ right.double(), left.double() @ matrix.double()
    pairs = [
        (products.product_of_rows(left, matrix), product),
        (products.product_of_rows(left, matrix.contiguous(), added, alpha=-0.5), added.double() - 0.5 * product),
        (products.product_of_rows(left, matrix, added[0]), added[0].double() + product),
        (products.product_over_rows(left, right, torch.float32), wide),
        (summed, total.double() + wide),
        (turned, total.double() + wide),
        (written, wide),
        (products.product_of_rows(left, matrix, out := added.clone(), out=out), added.double() + product),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert (len(calls) >= 4) == convolves
