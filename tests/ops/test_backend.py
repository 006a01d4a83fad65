"""The choice of an implementation: global, for a block, nested, restored after errors, and refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cdt_fast import ops
from cdt_fast.errors import InputError
from cdt_fast.kernels import cards
from cdt_fast.kernels.aot.case import float32_products
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
