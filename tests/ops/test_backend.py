"""The choice of an implementation: global, for a block, nested, restored after errors, and refused with the reason."""

from __future__ import annotations

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
from cdt_fast.ops import common
from cdt_fast.ops.lista_step import lista_step_reference


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = common._setting
    yield
    common._setting = before


def test_the_import_loads_neither_the_compiler_nor_triton() -> None:
    code = "import sys, cdt_fast.ops; assert not {'torch._dynamo', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_blocks_nest_and_restore() -> None:
    ops.use_backend("auto")
    with ops.use_backend("torch"):
        assert common._setting == "torch"
        assert common.explain() == "torch (chosen by use_backend)"
        with ops.use_backend("auto"):
            assert common._setting == "auto"
            with ops.use_backend("auto"):
                pass
            assert common._setting == "auto"
        assert common._setting == "torch"
    assert common._setting == "auto"


def test_a_block_restores_what_was_set_globally_and_after_an_error() -> None:
    ops.use_backend("torch")
    with pytest.raises(ZeroDivisionError), ops.use_backend("auto"):
        raise ZeroDivisionError
    assert common._setting == "torch"


@pytest.mark.parametrize("name", ["cuda", "Torch", "", None, 1])
def test_unknown_names_are_refused_and_change_nothing(name: Any) -> None:
    ops.use_backend("torch")
    with pytest.raises(InputError, match=r"backend must be one of 'auto', 'triton', 'torch', got "):
        ops.use_backend(name)
    assert common._setting == "torch"


def test_triton_is_refused_with_the_reason_where_no_kernel_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "unavailable_reason", lambda: "the moon is in the way")
    ops.use_backend("auto")
    with pytest.raises(
        InputError, match=r"'triton' cannot be used here: the moon is in the way. 'auto' and 'torch' can"
    ):
        ops.use_backend("triton")
    assert common._setting == "auto"
    assert common.explain() == "torch (the moon is in the way)"


def test_triton_is_taken_where_kernels_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "unavailable_reason", lambda: None)
    monkeypatch.setattr(common, "interpreting", lambda: True)
    with ops.use_backend("triton"):
        assert common._setting == "triton"
        assert common.explain() == "triton (in its interpreter, on the CPU)"
    ops.use_backend("auto")
    assert common.explain().startswith("triton")


def test_a_kernel_is_refused_with_the_first_reason_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "unavailable_reason", lambda: None)
    monkeypatch.setattr(common, "interpreting", lambda: True)
    tensor = torch.zeros(2, 3)
    with ops.use_backend("triton"):
        assert common.choose_backend("an_op", tensor) == "triton"
        for tensors in ((tensor.double(),), (tensor, tensor.double())):
            with pytest.raises(InputError, match=r"cannot run an_op here: .* not in float64"):
                common.choose_backend("an_op", *tensors)
        with pytest.raises(InputError, match="the tensors are on meta and the kernels run on cpu"):
            common.choose_backend("an_op", tensor.to("meta"))
    with ops.use_backend("auto"):
        assert common.choose_backend("an_op", tensor.double()) == "torch"
    with ops.use_backend("torch"):
        assert common.choose_backend("an_op", tensor) == "torch"


def test_float32_is_multiplied_by_kernels_only_on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "unavailable_reason", lambda: None)
    monkeypatch.setattr(common, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(common, "interpreting", lambda: False)
    tensor = torch.zeros(2, 3)
    for tf32 in (True, False):
        monkeypatch.setattr(common, "dot_precision", lambda _, tf32=tf32: "tf32" if tf32 else "ieee")
        with ops.use_backend("auto"):
            products = common.choose_backend("an_op", tensor, multiplies=True)
            assert products == ("triton" if tf32 else "torch")
            assert common.choose_backend("an_op", tensor) == "triton"
            assert common.choose_backend("an_op", tensor.bfloat16(), multiplies=True) == "triton"
            with ops.use_backend("triton"):
                assert common.choose_backend("an_op", tensor, multiplies=True) == "triton"


@pytest.mark.parametrize(
    ("found", "version", "reason"),
    [(None, "3.7.1", "Triton is not installed"), ("a spec", "3.2.0", "Triton 3.2 is too old: 3.4 or newer")],
)
def test_a_missing_or_old_triton_is_named(
    found: str | None, version: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(common.importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(triton, "__version__", version)
    assert reason in str(common.unavailable_reason.__wrapped__())


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops take this processor for a card that no kernel has run on."""
    pytest.importorskip("triton")
    reasons = {"unavailable_reason": None, "unsupported_reason": None, "without_tensor_cores": False}
    for name, answer in {**reasons, "interpreting": False, "spec_of": common.SMALLEST}.items():
        monkeypatch.setattr(common, name, lambda *_, answer=answer: answer)
    for name in ("_worked", "_disabled"):
        monkeypatch.setattr(common, name, set())


TOOLCHAIN = RuntimeError("Triton Error [CUDA]: the provided PTX was compiled with an unsupported toolchain.")


@pytest.mark.parametrize(
    ("environment", "error", "words"),
    [  # without an error, Triton's own
        ({"PATH": ""}, None, "Failed to find C compiler.* To run them, install gcc, or set CC"),
        ({"CC": "false"}, None, "CalledProcessError: .* status 1. To .* if Python.h is missing, install python3-dev"),
        (
            {},
            AssertionError("libcuda.so cannot found!\nrun ldconfig"),
            "run ldconfig. To run them, set TRITON_LIBCUDA_PATH",
        ),
        ({}, PermissionError(13, "Permission denied", "/root/.triton"), "Permission denied.* set TRITON_CACHE_DIR"),
        (
            {},
            ImportError("utils.so: failed to map segment"),
            "failed to map segment. To run them, set TRITON_CACHE_DIR",
        ),
        ({}, TOOLCHAIN, "unsupported toolchain. To run them, install a newer NVIDIA driver"),
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

    calls, build = [], nvidia.compile_module_from_src

    def compile_module_from_src(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if error is not None:
            raise error
        return build(*args, **options)

    # All is Triton's, up to what it compiles of its own for a driver that it believes to be there.
    monkeypatch.setattr(nvidia, "compile_module_from_src", compile_module_from_src)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(driver, "_default", None)
    monkeypatch.setattr(driver, "_active", None)
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
            found = ops.lista_step(*step, **options)
        assert len(warned) == 1
        torch.testing.assert_close(found, lista_step_reference(*step, **options))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ops.lista_step(*step, **options)
        assert len(calls) == 2
        assert common.choose_backend("lista_step", step[0]) == "torch"
        for tensor in (step[0].half(), step[0].to("meta")):
            assert common.choose_backend("lista_step", tensor) == "triton"
        assert common.choose_backend("residual_linear", step[0]) == "triton"


def test_only_the_compiler_is_forgiven_once_a_kernel_has_worked(on_a_card: None) -> None:
    def fail(error: Exception) -> None:
        with common.or_plain_torch("an_op", torch.zeros(3)):
            raise error

    blamed = (InputError("n"), TypeError("unexpected keyword"), torch.OutOfMemoryError(), RuntimeError("out of memory"))
    for size in (0, 3):
        with common.or_plain_torch("an_op", torch.zeros(size)):
            pass
        for error in (*blamed, *[RuntimeError("an illegal memory access was encountered")] * (size > 0)):
            with pytest.raises(type(error)):
                fail(error)
        assert len(common._worked) == (size > 0)
    with pytest.warns(RuntimeWarning, match="out of resource"):
        fail(RuntimeError("out of resource: shared memory"))


@pytest.fixture
def kernels_of_attention(on_a_card: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels are taken to run here; the forward's does (by torch), the backward's does not compile."""
    from cdt_fast.kernels import symmetric_attention as kernels

    calls: list[str] = []

    def forward(z: Tensor, *_: Any) -> tuple[Tensor, Tensor, None]:
        calls.append("forward")
        scores = z @ z.mT
        return scores.softmax(-1) @ z, scores.logsumexp(-1), None

    def backward(*_: Any) -> Any:
        calls.append("backward")
        raise RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 101376")

    monkeypatch.setattr(kernels, "forward", forward)
    monkeypatch.setattr(kernels, "backward", backward)
    return calls


def _attention_and_gradient(z: Tensor) -> tuple[Tensor, Tensor]:
    output = ops.symmetric_attention(z)
    return output.detach(), torch.autograd.grad(output.square().sum(), z)[0]


def test_plain_torch_takes_over_with_one_warning(kernels_of_attention: list[str]) -> None:
    z = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float().requires_grad_()
    with ops.use_backend("torch"):
        expected = _attention_and_gradient(z)
    with ops.use_backend("auto"):
        with pytest.warns(RuntimeWarning, match="symmetric_attention runs on plain torch .* out of resource"):
            found = _attention_and_gradient(z)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = _attention_and_gradient(z)
    assert kernels_of_attention == ["forward", "backward"]
    for one, other, value in zip(found, again, expected, strict=True):
        torch.testing.assert_close(one, value)
        assert torch.equal(other, value)


def test_asked_for_triton_there_is_no_other_way(kernels_of_attention: list[str]) -> None:
    z = torch.randn(2, 5, 4).requires_grad_()
    with ops.use_backend("triton"), pytest.raises(RuntimeError, match="out of resource"):
        _attention_and_gradient(z)
    assert not common._disabled
