"""`ops.unrolled_layer` on its kernels: fused, or composed of ops with kernels, with every gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.kernels import unrolled_layer as unrolled
from cdt_fast.kernels.blocks import LONGEST, WIDEST
from tests.kernels.kernel_cases import normal
from tests.kernels.precision import assert_as_precise
from tests.kernels.unrolled_cases import Inputs, Shape, written_forward

LEAVES = ("codes", "signal", "dictionary", "projection", "next_dictionary")
OUTPUTS = ("next codes", "next projection", "error")


def leaves_of(inputs: Inputs, projection: bool) -> dict[str, Tensor]:
    """What is differentiated."""
    named = {name: getattr(inputs, name) for name in LEAVES if projection or name != "projection"}
    return {name: tensor.detach().requires_grad_() for name, tensor in named.items() if tensor is not None}


def differentiated(outputs: list[Tensor], leaves: dict[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
    """The outputs and the gradients by name, from the upstream gradients of `inputs`; all on the CPU."""
    upstream = [inputs.grad_next_codes, inputs.grad_next_projection, torch.tensor(0.4)]
    upstream = [given.to(output) for given, output in zip(upstream, outputs, strict=False) if given is not None]
    found = torch.autograd.grad(outputs, list(leaves.values()), upstream)
    named = dict(zip(OUTPUTS, outputs, strict=False)) | dict(zip(leaves, found, strict=True))
    return {name: tensor.detach().cpu() for name, tensor in named.items()}


def by_the_op(inputs: Inputs, projection: bool, backend: Any) -> dict[str, Tensor]:
    leaves = leaves_of(inputs, projection)
    names = ("lengths", "target", "step", "threshold", "scale", "nonlinearity")
    options = {name: getattr(inputs, name) for name in names}
    options |= {"codes": None} if inputs.codes is None else {}
    with ops.use_backend(backend):
        return differentiated(list(ops.unrolled_layer(**leaves, **options)), leaves, inputs)


def by_the_formula(inputs: Inputs, projection: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    inputs = inputs.on_cpu(dtype)
    leaves = leaves_of(inputs, projection)
    given = dict(leaves)
    if not projection:
        given["projection"] = leaves["codes"] @ leaves["dictionary"].mT
    outputs = written_forward(dataclasses.replace(inputs, **given)).values()
    return differentiated([output for output in outputs if output is not None], leaves, inputs)


def assert_is_the_formula(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    projection: bool = True,
    composed: bool = False,
    **given: Any,
) -> None:
    """By the criterion, at most 1.5 times the error of the op in plain torch, or of the formula where `composed`.

    There the gradients of two attentions are rounded apart, as torch rounds those of the formula.
    """
    for attempt in range(20):
        inputs = Inputs.of(shape, device, dtype, **given)
        inputs.signal.add_(normal(100 + attempt, *inputs.signal.shape).to(inputs.signal))
        exact = by_the_formula(inputs, projection, torch.float64)
        plain = by_the_formula(inputs, projection, dtype) if composed else by_the_op(inputs, projection, "torch")
        mine = by_the_op(inputs, projection, "triton")
        masks = [found["next codes"] == 0 for found in (exact, plain, mine)]
        # Otherwise it is chance which codes rounding moves across a kink, and with them a part of the gradient.
        if torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2]):
            break
    else:
        pytest.fail("rounding always moves a code across a kink")
    assert list(mine) == list(exact)
    features = inputs.projection
    if not projection:
        assert inputs.codes is not None
        features = inputs.codes @ inputs.dictionary.mT
    logit = 2 * inputs.scale * features.double().square().sum(-1).amax().cpu()
    share = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    for name, true in exact.items():
        terms = None
        if name == "error":  # a float32 sum over numbers that are rounded to the dtype
            terms = share * true
        elif name in ("codes", "projection", "dictionary"):  # a logit rounds by a share of its size, in float32
            terms = logit / share * true
        assert_as_precise(name, mine[name], plain[name], true, terms)


@pytest.mark.parametrize("next_width", [None, 21])
@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("lengths", [None, (3, 0, 7)])
@pytest.mark.parametrize(("codes", "projection"), [(True, False), (True, True), (False, True)])
def test_values_and_gradients(
    codes: bool,
    projection: bool,
    lengths: Any,
    target: bool,
    next_width: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    # float16 is fused, float32 composed of ops.
    shape, given = Shape(3, 7, next_width=next_width), {"target": target, "lengths": lengths, "codes": codes}
    assert_is_the_formula(shape, device, dtype, projection, composed=dtype == torch.float32, **given)


@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("projection", [False, True])
@pytest.mark.parametrize(
    "shape",
    [Shape(2, LONGEST + 1, 20, 18, 21), Shape(2, 3, 20, WIDEST + 3), Shape(2, 3, 20, 18, 259), Shape(2, 1, 20, 259)],
)
def test_what_no_tile_holds_is_composed_of_ops(
    shape: Shape, projection: bool, target: bool, device: torch.device
) -> None:
    for dtype in (torch.float32, torch.float16):
        given = {
            "lengths": (shape.tokens, min(2, shape.tokens - 1)),
            "nonlinearity": "soft_threshold",
            "threshold": 0.0,
            "target": target,
        }
        assert_is_the_formula(shape, device, dtype, projection, composed=True, **given)
        if projection:
            assert_is_the_formula(shape, device, dtype, composed=True, codes=False, **given)


@pytest.mark.parametrize(
    ("shape", "kept", "fused"),
    [
        (Shape(2, LONGEST, 20, 18), torch.float16, True),
        (Shape(2, LONGEST + 1, 20, 18), torch.float16, False),
        (Shape(1, 2, 20, WIDEST), torch.float16, True),
        (Shape(1, 2, 20, WIDEST + 1), torch.float16, False),
        (Shape(1, 2, 20, 18, WIDEST + 1), torch.float16, False),
        (Shape(1, 2, 20, 18), torch.float32, False),
    ],
)
def test_which_kernels_run(
    shape: Shape, kept: torch.dtype, fused: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    for name in ("unrolled_forward", "unrolled_backward"):
        launcher = getattr(unrolled, name)
        monkeypatch.setattr(
            unrolled, name, lambda *given, launcher=launcher, name=name: (called.append(name), launcher(*given))[1]
        )
    by_the_op(Inputs.of(shape, device, kept, threshold=0.0), True, "triton")
    assert called == (["unrolled_forward", "unrolled_backward"] if fused else [])


@pytest.mark.parametrize("next_width", [None, 21])
def test_strided_and_expanded_inputs(next_width: int | None, device: torch.device) -> None:
    inputs = Inputs.of(Shape(next_width=next_width), device, torch.float16, lengths=(3,) * 5)
    assert inputs.lengths is not None
    names = ("codes", "signal", "projection", "dictionary", "next_dictionary", "target", "grad_next_codes")
    matrices = {name: getattr(inputs, name) for name in names if getattr(inputs, name) is not None}
    # Copies, as the op makes them too: where sixteen divides the addresses another kernel is compiled, which sums in
    # another order.
    copies = {name: matrix.clone() for name, matrix in matrices.items()}
    expected = by_the_op(dataclasses.replace(inputs, **copies), True, "triton")
    transposed = {name: matrix.mT.contiguous().mT for name, matrix in matrices.items()}
    every_other = torch.stack([inputs.lengths, inputs.lengths + 2], 1)[:, 0]
    for lengths in (every_other, inputs.lengths[:1].expand(5)):
        assert not any(tensor.is_contiguous() for tensor in (lengths, *transposed.values()))
        found = by_the_op(dataclasses.replace(inputs, **transposed, lengths=lengths), True, "triton")
        for name, mine in found.items():
            assert torch.equal(mine, expected[name]), name


@pytest.mark.parametrize("target_dtype", [torch.float16, torch.float32, torch.float64])
def test_a_target_in_any_dtype(target_dtype: torch.dtype, device: torch.device, dtype: torch.dtype) -> None:
    inputs = Inputs.of(Shape(), device, torch.float16)
    assert inputs.target is not None
    inputs.target.mul_(16).round_().div_(16)  # every dtype holds these
    given = dataclasses.replace(
        inputs, **{name: getattr(inputs, name).to(dtype) for name in ("codes", "signal", "dictionary", "projection")}
    )
    expected = by_the_op(dataclasses.replace(given, target=inputs.target.to(dtype)), True, "triton")
    found = by_the_op(dataclasses.replace(given, target=inputs.target.to(target_dtype)), True, "triton")
    assert found["error"].dtype == torch.float32
    for name, mine in found.items():
        assert mine.dtype == expected[name].dtype
        assert torch.equal(mine, expected[name]), name


def test_a_loss_of_weight_zero_gives_no_gradient_where_it_is_infinite(device: torch.device, dtype: torch.dtype) -> None:
    inputs = Inputs.of(Shape(), device, dtype)
    assert inputs.target is not None
    inputs.target[1, 2, 3] = float("inf")
    assert inputs.codes is not None
    codes = inputs.codes.detach().requires_grad_()
    found = ops.unrolled_layer(codes, inputs.signal, inputs.dictionary, step=0.3, threshold=0.1, target=inputs.target)
    assert torch.isinf(found[2])
    upstream = [torch.ones_like(output) for output in found[:2]]
    (gradient,) = torch.autograd.grad(found, codes, [*upstream, torch.zeros_like(found[2])], retain_graph=True)
    (expected,) = torch.autograd.grad(found[:2], codes, upstream)
    assert torch.isfinite(expected).all()
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("poisoned", ["codes", "signal"])
def test_a_nan_shows_in_its_sequence_and_in_no_other(poisoned: str, device: torch.device, dtype: torch.dtype) -> None:
    inputs = Inputs.of(Shape(), device, dtype, target=False)
    clean = by_the_op(inputs, False, "triton")
    getattr(inputs, poisoned)[1, 3, -2] = float("nan")
    found = by_the_op(inputs, False, "triton")
    for name in ("next codes", "next projection", "codes", "signal"):
        assert torch.equal(found[name][[0, 2, 3, 4]], clean[name][[0, 2, 3, 4]]), name
    assert torch.isnan(found["next codes"][1]).any()
    assert torch.isnan(found["next projection"][1]).any()
    assert torch.isnan(found["dictionary"]).any()
