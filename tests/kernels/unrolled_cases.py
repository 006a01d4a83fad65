"""What the tests of the unrolled layer's kernels share: inputs between NaN, launchers, formula, criterion."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import Nonlinearity, UnrolledLayerArguments, UnrolledLayerBackwardArguments
from cdt_fast.kernels.blocks import Blocks
from cdt_fast.kernels.unrolled_layer import unrolled_backward, unrolled_forward
from cdt_fast.ops.shared.checks import padding_mask
from cdt_fast.ops.soft_threshold.reference import shrink_reference
from tests.kernels.kernel_cases import normal, poisoned
from tests.kernels.precision import assert_as_precise

SMALL = Blocks(rows=32, atoms=16, columns=16, warps=4, stages=1)
OUTPUTS = ("next codes", "next projection", "errors")
# In the order of `UnrolledLayerGradients`.
GRADIENTS = ("update", "residual", "whole dZ+", "signal", "projection", "codes")
Results = dict[str, Tensor | None]


class Shape(NamedTuple):
    """`code_width` m, `width` n, and `next_width` k of a next dictionary; None: the dictionary itself."""

    sequences: int = 5
    tokens: int = 7
    code_width: int = 20
    width: int = 18
    next_width: int | None = None


@dataclass
class Inputs:
    """What the launchers take, in the dtype and on the device that they run in."""

    codes: Tensor | None
    signal: Tensor
    projection: Tensor
    dictionary: Tensor
    next_dictionary: Tensor | None
    target: Tensor | None
    grad_next_codes: Tensor | None
    grad_next_projection: Tensor | None
    grad_error: Tensor | None
    lengths: Tensor | None = None
    step: float = 0.3
    threshold: float = 0.1
    scale: float = 0.6
    nonlinearity: Nonlinearity = "soft_threshold"

    @classmethod
    def of(
        cls,
        shape: Shape,
        device: torch.device,
        dtype: torch.dtype,
        *,
        target: bool = True,
        codes: bool = True,
        **given: Any,
    ) -> Inputs:
        """Logits of the order of one, so that attention is neither even nor on one token, and every gradient given."""
        tokens, m, n = shape[:2], shape.code_width, shape.width
        k = n if shape.next_width is None else shape.next_width
        tensors = {
            "codes": normal(1, *tokens, m) if codes else None,
            "signal": normal(2, *tokens, n),
            "projection": normal(3, *tokens, n) / n**0.25,
            "dictionary": normal(4, n, m) / n**0.5,
            "next_dictionary": None if shape.next_width is None else normal(5, k, m) / m**0.5,
            "target": normal(6, *tokens, k) if target else None,
            "grad_next_codes": normal(7, *tokens, m),
            "grad_next_projection": normal(8, *tokens, k),
        }
        placed = {
            name: None if tensor is None else poisoned(tensor.to(device, dtype)) for name, tensor in tensors.items()
        }
        grad_error = torch.tensor([0.4], dtype=torch.float32, device=device) if target else None
        if given.get("lengths") is not None:
            given["lengths"] = torch.as_tensor(given["lengths"]).to(device)
        if given.get("nonlinearity") == "identity":
            given["threshold"] = 0.0
        return cls(**placed, grad_error=grad_error, **given)

    def on_cpu(self, dtype: torch.dtype) -> Inputs:
        moved = {name: value.cpu() for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: v.to(dtype) if v.is_floating_point() else v for name, v in moved.items()})

    def tokens(self) -> dict[str, Tensor]:
        """The tensors `[B, T, …]` that are there, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor) and value.dim() == 3}


UPSTREAM = ("grad_next_codes", "grad_next_projection", "grad_error")


def programs_of(inputs: Inputs, blocks: Blocks | None) -> int | None:
    """As few blocks as hold all sequences; None: as many as a card takes."""
    sequences, tokens = inputs.signal.shape[:2]
    return None if blocks is None else -(-sequences // max(1, blocks.rows // max(1, tokens)))


def forward(inputs: Inputs, blocks: Blocks | None = SMALL) -> Results:
    layer = UnrolledLayerArguments(**{name: value for name, value in vars(inputs).items() if name not in UPSTREAM})
    return dict(zip(OUTPUTS, unrolled_forward(layer, blocks, programs_of(inputs, blocks)), strict=True))


def backward(
    inputs: Inputs, next_codes: Tensor, next_projection: Tensor | None, blocks: Blocks | None = SMALL, **needs: Any
) -> Results:
    needs = {"needs_codes": inputs.codes is not None} | needs
    layer = UnrolledLayerBackwardArguments(
        **vars(inputs), next_codes=next_codes, next_projection=next_projection, **needs
    )
    programs = programs_of(inputs, blocks)
    return dict(zip(GRADIENTS, unrolled_backward(layer, blocks, programs), strict=True))


def written_update(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """U, (1/c)(X − A Z) and the mask `[B, T, 1]` of the padding, attention in at least float32."""
    i, padding = inputs, padding_mask(inputs.lengths, inputs.signal)
    codes, signal, projection = i.codes, i.signal, i.projection
    wide = torch.promote_types(signal.dtype, torch.float32)
    scores = i.scale * (projection.to(wide) @ projection.to(wide).mT)
    if padding is not None:
        scores = scores.masked_fill(padding.unsqueeze(-2), float("-inf"))
    attention = torch.softmax(scores, -1)
    if padding is not None:
        attention = attention.masked_fill(padding.unsqueeze(-1), 0.0)
        signal = signal.masked_fill(padding.unsqueeze(-1), 0.0)
    attention = attention.to(signal.dtype)
    residual = i.step * (signal - attention @ (projection if codes is not None else projection - signal))
    update = residual @ i.dictionary
    return update if codes is None else attention @ codes + update, residual, padding


def written_forward(inputs: Inputs) -> Results:
    """The kernel's results by the formula, in the dtype of `inputs`; the error is the sum over all tiles."""
    update, _, padding = written_update(inputs)
    nonlinearity = inputs.nonlinearity
    next_codes = shrink_reference(update, inputs.threshold, nonlinearity)
    following = inputs.dictionary if inputs.next_dictionary is None else inputs.next_dictionary
    next_projection = next_codes @ following.mT
    error = None
    if inputs.target is not None:
        wide = torch.promote_types(next_projection.dtype, torch.float32)
        error = next_projection.to(wide) - inputs.target.to(wide)
        error = (error if padding is None else error.masked_fill(padding.unsqueeze(-1), 0.0)).square().sum()
    return dict(zip(OUTPUTS, (next_codes, next_projection, error), strict=True))


def written_backward(inputs: Inputs, next_codes: Tensor, next_projection: Tensor | None) -> Results:
    """The kernels' results by the formula, in the dtype of `inputs`, of the given next codes: no kink to cross."""
    i = inputs
    given = {"signal": i.signal, "projection": i.projection} | ({} if i.codes is None else {"codes": i.codes})
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
    update, residual, padding = written_update(replace(i, **leaves))
    following = i.dictionary if i.next_dictionary is None else i.next_dictionary
    whole = i.grad_next_projection
    if i.target is not None and i.grad_error is not None:
        assert next_projection is not None
        wide = torch.promote_types(next_projection.dtype, torch.float32)
        error = 2 * i.grad_error.to(wide) * (next_projection.to(wide) - i.target.to(wide))
        whole = (error if whole is None else error + whole.to(wide)).to(i.signal.dtype)
    grad_update = torch.zeros_like(next_codes) if whole is None else whole @ following
    if i.grad_next_codes is not None:
        grad_update = grad_update + i.grad_next_codes
    if i.nonlinearity != "identity":
        grad_update = grad_update * (next_codes != 0)
    if padding is not None:
        grad_update = grad_update.masked_fill(padding.unsqueeze(-1), 0.0)
        if whole is not None and whole is not i.grad_next_projection:
            whole = whole.masked_fill(padding.unsqueeze(-1), 0.0)
    signal, projection, *codes = torch.autograd.grad(update, list(leaves.values()), grad_update)
    found = (grad_update, residual.detach(), whole, signal, projection, codes[0] if codes else None)
    return dict(zip(GRADIENTS, found, strict=True))


def assert_forward_is_the_formula(inputs: Inputs, blocks: Blocks | None = SMALL) -> Results:
    """Every result of the forward against float64, by the criterion of `precision`."""
    dtype = inputs.signal.dtype
    given = forward(inputs, blocks)
    plain, exact = written_forward(inputs.on_cpu(dtype)), written_forward(inputs.on_cpu(torch.float64))
    for name, terms in zip(OUTPUTS[:2], (update_terms(inputs), None), strict=True):
        mine = given[name]
        assert mine is not None
        assert mine.is_contiguous()
        assert_as_precise(name, mine.cpu(), plain[name], exact[name], terms)  # type: ignore[arg-type]
    errors, right = given["errors"], exact["errors"]
    assert (errors is None) == (right is None)
    if errors is not None and right is not None and plain["errors"] is not None:
        assert errors.dtype == torch.float32
        mine, torchs = (abs(value.double().sum().cpu() - right) for value in (errors, plain["errors"]))
        assert mine <= 1.5 * torchs + torch.finfo(dtype).eps * right
    return given


def backward_inputs(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The next codes and their projection, exact but for one rounding, in memory of their own between NaN."""
    exact = written_forward(inputs.on_cpu(torch.float64))
    codes, projection = (poisoned(exact[name].to(inputs.signal)) for name in OUTPUTS[:2])  # type: ignore[union-attr]
    return codes, projection


def update_terms(inputs: Inputs) -> Tensor:
    """What the criterion allows beside the size of U, two sums one after the other in float32: those of the sizes."""
    i, share = inputs.on_cpu(torch.float64), torch.finfo(torch.float32).eps / torch.finfo(inputs.signal.dtype).eps
    _, residual, _ = written_update(i)
    terms = residual.abs() @ i.dictionary.abs()
    if i.codes is not None:
        terms += written_update(replace(i, codes=i.codes.abs(), dictionary=torch.zeros_like(i.dictionary)))[0]
    return share * terms


def grad_projection_terms(inputs: Inputs, exact: Results) -> Tensor:
    """What the criterion allows beside the size of dZ: `dS = A (dA − rowsum(A dA))` is a difference of equal sums.

    It is summed in float32 whatever the inputs are. Where a token sees itself alone it is zero, and torch's softmax
    subtracts a number from itself there.
    """
    i, share = inputs.on_cpu(torch.float64), torch.finfo(torch.float32).eps / torch.finfo(inputs.signal.dtype).eps
    update, grad_signal = exact["update"], exact["signal"]
    assert update is not None
    assert grad_signal is not None
    if i.codes is None:
        # dX = dR + Aᵀ dR; the values are Z − X.
        grad_residual = i.step * update.abs() @ i.dictionary.abs().mT
        sums = grad_residual @ (i.projection - i.signal).abs().mT
    else:
        sums = update.abs() @ i.codes.abs().mT + grad_signal.abs() @ i.projection.abs().mT
    return share * 4 * abs(i.scale) * sums.amax(-1, keepdim=True) * i.projection.abs()


def assert_backward_is_the_formula(
    inputs: Inputs, blocks: Blocks | None = SMALL, missing: tuple[str, ...] = (), **needs: bool
) -> Results:
    """Every result of the backward against float64, by the criterion of `precision`; those `missing` are None."""
    dtype = inputs.signal.dtype
    following = backward_inputs(inputs)
    given = backward(inputs, *following, blocks, **needs)
    plain = written_backward(inputs.on_cpu(dtype), *(tensor.cpu() for tensor in following))
    exact = written_backward(inputs.on_cpu(torch.float64), *(tensor.cpu().double() for tensor in following))
    for name in GRADIENTS:
        mine = given[name]
        if name in missing or exact[name] is None:
            assert mine is None, name
            continue
        if name == "signal" and not needs.get("needs_signal", True):
            continue
        assert mine is not None, name
        assert mine.is_contiguous()
        if mine is inputs.grad_next_projection:
            continue  # it is handed on, with whatever stands in its padding
        terms = grad_projection_terms(inputs, exact) if name == "projection" else None
        assert_as_precise(name, mine.cpu(), plain[name], exact[name], terms)  # type: ignore[arg-type]
    return given
