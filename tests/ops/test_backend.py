"""The choice of an implementation: global, for a block, nested, restored after errors, and refused with the reason."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.errors import InputError
from cdt_fast.kernels import cards
from cdt_fast.kernels.aot.case import float32_products
from cdt_fast.kernels.blocks import Blocks
from cdt_fast.kernels.launch import KernelError, Launch
from cdt_fast.ops.shared import backend


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = backend._setting
    yield
    backend._setting = before


def test_a_call_sets_it_for_the_whole_process() -> None:
    ops.use_backend("torch")
    assert backend._setting == "torch"
    assert backend.explain() == "torch (chosen by use_backend)"
    ops.use_backend("auto")
    assert backend._setting == "auto"


def test_blocks_nest_and_restore() -> None:
    ops.use_backend("auto")
    with ops.use_backend("torch"):
        assert backend._setting == "torch"
        with ops.use_backend("auto"):
            assert backend._setting == "auto"
            with ops.use_backend("auto"):
                pass
            assert backend._setting == "auto"
        assert backend._setting == "torch"
    assert backend._setting == "auto"


def test_a_block_restores_what_was_set_globally_and_after_an_error() -> None:
    ops.use_backend("torch")
    with pytest.raises(ZeroDivisionError), ops.use_backend("auto"):
        raise ZeroDivisionError
    assert backend._setting == "torch"


def test_the_ops_compute_within_every_block() -> None:
    x = torch.randn(3, 4)
    expected = ops.symmetric_attention(x)
    for name in ("auto", "torch"):
        with ops.use_backend(name):
            assert torch.equal(ops.symmetric_attention(x), expected)


@pytest.mark.parametrize("name", ["cuda", "Torch", "", None, 1])
def test_unknown_names_are_refused_and_change_nothing(name: Any) -> None:
    ops.use_backend("torch")
    with pytest.raises(InputError, match=r"backend must be one of 'auto', 'triton', 'torch', got "):
        ops.use_backend(name)
    assert backend._setting == "torch"


def test_triton_is_refused_with_the_reason_where_no_kernel_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "unavailable_reason", lambda: "the moon is in the way")
    ops.use_backend("auto")
    with pytest.raises(
        InputError, match=r"'triton' cannot be used here: the moon is in the way. 'auto' and 'torch' can"
    ):
        ops.use_backend("triton")
    assert backend._setting == "auto"
    assert backend.explain() == "torch (the moon is in the way)"


def test_triton_is_taken_where_kernels_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "unavailable_reason", lambda: None)
    monkeypatch.setattr(cards, "interpreting", lambda: True)
    with ops.use_backend("triton"):
        assert backend._setting == "triton"
        assert backend.explain() == "triton (in its interpreter, on the CPU)"
    ops.use_backend("auto")
    assert backend.explain().startswith("triton")


def test_a_kernel_is_refused_with_the_first_reason_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "unavailable_reason", lambda: None)
    monkeypatch.setattr(cards, "interpreting", lambda: True)
    tensor = torch.zeros(2, 3)
    with ops.use_backend("triton"):
        assert backend.choose_backend("an_op", tensor) == "triton"
        for tensors in ((tensor.double(),), (tensor, tensor.double())):
            with pytest.raises(InputError, match=r"cannot run an_op here: .* not in float64"):
                backend.choose_backend("an_op", *tensors)
        with pytest.raises(InputError, match="the tensors are on meta and the kernels run on cpu"):
            backend.choose_backend("an_op", tensor.to("meta"))
    with ops.use_backend("auto"):
        assert backend.choose_backend("an_op", tensor.double()) == "torch"
    with ops.use_backend("torch"):
        assert backend.choose_backend("an_op", tensor) == "torch"


def test_float32_is_multiplied_by_kernels_only_on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "unavailable_reason", lambda: None)
    monkeypatch.setattr(cards, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(cards, "interpreting", lambda: False)
    tensor = torch.zeros(2, 3)
    for tf32 in (True, False):
        with float32_products(tf32), ops.use_backend("auto"):
            products = backend.choose_backend("an_op", tensor, multiplies=True)
            assert products == ("triton" if tf32 else "torch")
            assert backend.choose_backend("an_op", tensor) == "triton"
            assert backend.choose_backend("an_op", tensor.bfloat16(), multiplies=True) == "triton"
            with ops.use_backend("triton"):
                assert backend.choose_backend("an_op", tensor, multiplies=True) == "triton"


@pytest.mark.parametrize(
    ("found", "version", "reason"),
    [(None, "3.7.1", "Triton is not installed"), ("a spec", "3.2.0", "Triton 3.2.0 is too old: 3.4 or newer")],
)
def test_a_missing_or_old_triton_is_named(
    found: str | None, version: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(cards.importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(triton, "__version__", version)
    assert reason in str(cards._unavailable_reason.__wrapped__())


def test_this_machine_gives_a_reason_or_none() -> None:
    reason = cards.unavailable_reason()
    assert reason is None or reason
    if reason is not None:
        with pytest.raises(InputError, match="triton"):
            ops.use_backend("triton")


class _Refused:
    """In the place of a kernel that does not compile."""

    __name__ = "packed_backward_kernel"
    arg_names = ("z",)

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getitem__(self, grid: Any) -> Any:
        def launch(**arguments: Any) -> None:
            raise self._error

        return launch


def test_what_the_compiler_refuses_names_kernel_and_card() -> None:
    triton_errors = pytest.importorskip("triton.runtime.errors")
    refused = (triton_errors.OutOfResources(300_000, 101_376, "shared memory"), RuntimeError("PassManager::run failed"))
    for error in refused:
        with pytest.raises(KernelError, match=r"^packed_backward_kernel does not run on .*: (out of|PassManager)"):
            Launch(_Refused(error), (1,), Blocks(), {"z": torch.zeros(1)}, {}).run()
    for error in (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), TypeError("z")):
        with pytest.raises(type(error), match=str(error)[-5:]):
            Launch(_Refused(error), (1,), Blocks(), {"z": torch.zeros(1)}, {}).run()


@pytest.fixture
def kernels_of_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels are taken to run here; the forward's does (by torch), the backward's does not compile."""
    from cdt_fast.kernels import symmetric_attention as kernels

    calls: list[str] = []

    def forward(attention: Any) -> tuple[Tensor, Tensor, Tensor]:
        calls.append("forward")
        scores = attention.z @ attention.z.mT
        return scores.softmax(-1) @ attention.z, scores.logsumexp(-1), torch.zeros_like(attention.z)

    def backward(attention: Any) -> Any:
        calls.append("backward")
        raise KernelError("packed_backward_kernel does not run on a card: out of resource")

    monkeypatch.setattr(kernels, "symmetric_attention_forward", forward)
    monkeypatch.setattr(kernels, "symmetric_attention_backward", backward)
    monkeypatch.setattr(cards, "unavailable_reason", lambda: None)
    monkeypatch.setattr(cards, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(cards, "without_tensor_cores", lambda _: False)
    yield calls
    backend._given_up.clear()


def _attention_and_gradient(z: Tensor) -> tuple[Tensor, Tensor]:
    output = ops.symmetric_attention(z)
    return output.detach(), torch.autograd.grad(output.square().sum(), z)[0]


def test_plain_torch_takes_over_with_one_warning(kernels_of_attention: list[str]) -> None:
    z = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float().requires_grad_()
    with ops.use_backend("torch"):
        expected = _attention_and_gradient(z)
    with ops.use_backend("auto"):
        with pytest.warns(RuntimeWarning, match="symmetric_attention is computed by plain torch .*packed_backward_ker"):
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
    with ops.use_backend("triton"), pytest.raises(KernelError, match="packed_backward_kernel does not run on a card"):
        _attention_and_gradient(z)
    assert not backend._given_up
