"""What the tests of the attention kernels share: inputs between NaN, the launchers, the formula, the criterion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdt_fast.kernels import cards
from cdt_fast.kernels.arguments import SymmetricAttentionArguments, SymmetricAttentionBackwardArguments
from cdt_fast.kernels.blocks import Blocks
from cdt_fast.kernels.cards import dot_precision
from cdt_fast.kernels.symmetric_attention_packed import packed_backward, packed_forward
from cdt_fast.kernels.symmetric_attention_streaming import streaming_backward, streaming_forward
from cdt_fast.ops.shared.checks import padding_mask
from cdt_fast.ops.symmetric_attention import symmetric_attention_reference
from tests.kernels.precision import assert_as_precise, epsilon_of

# Between an input and the ends of its buffer. Odd, so that no row is aligned; sixteen times a size keeps them aligned.
MARGINS = (3, 64)
SIZES = (1, 15, 16, 17, 35)
# Rows, terms and columns of a product of tiles of 16: every size in every dimension, and three tiles in all at once.
SHAPES = [
    *((size, 17, 16) for size in SIZES),
    *((16, size, 17) for size in SIZES),
    *((17, 16, size) for size in SIZES),
    (35, 35, 35),
    (1, 1, 1),
]


def normal(seed: int, *shape: int) -> Tensor:
    """Standard normal float64 on the CPU, the same for the same seed on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients_of(total: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Zeros where nothing arrives."""
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]


def poisoned(tensor: Tensor, margin: int = MARGINS[0]) -> Tensor:
    """The same values, contiguous, with `margin` NaN directly before and behind: a read outside shows."""
    buffer = tensor.new_full((tensor.numel() + 2 * margin,), float("nan"))
    inside = buffer[margin : margin + tensor.numel()].view(tensor.shape)
    inside.copy_(tensor)
    return inside


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit equal; NaN equals NaN."""
    return (
        one.dtype == other.dtype
        and torch.equal(torch.isnan(one), torch.isnan(other))
        and torch.equal(one.masked_fill(torch.isnan(one), 0), other.masked_fill(torch.isnan(other), 0))
    )


NAMES = ("output", "log-sum-exp", "gradient of z", "gradient of the values")
PACKED = Blocks(rows=16, columns=16, warps=4, stages=2)
STREAMING = Blocks(rows=16, keys=16, warps=4, stages=2)


class Shape(NamedTuple):
    """`values` is their width; None: z itself."""

    sequences: int
    tokens: int
    width: int
    values: int | None = None


@dataclass
class Inputs:
    """What both kernels take, in the dtype and on the device that they run in."""

    z: Tensor
    values: Tensor | None
    grad_output: Tensor
    lengths: Tensor | None = None
    scale: float = 0.6
    energy: bool = False

    @classmethod
    def of(
        cls, shape: Shape, device: torch.device, dtype: torch.dtype, margin: int = MARGINS[0], **given: Any
    ) -> Inputs:
        """Projections whose logits are of the order of one, so that attention is neither even nor on one token."""
        size = shape.sequences, shape.tokens
        z = normal(1, *size, shape.width) / shape.width**0.25
        values = None if shape.values is None else normal(2, *size, shape.values)
        grad_output = normal(3, *size, shape.width if shape.values is None else shape.values)
        tensors = [None if tensor is None else tensor.to(device, dtype) for tensor in (z, values, grad_output)]
        if given.get("lengths") is not None:
            given["lengths"] = torch.as_tensor(given["lengths"]).to(device)
        placed = [None if tensor is None else poisoned(tensor, margin) for tensor in tensors]
        return cls(*placed, **given)  # type: ignore[arg-type]

    @property
    def options(self) -> dict[str, Any]:
        return {"lengths": self.lengths, "scale": self.scale, "energy": self.energy}

    def forward(self, **given: Any) -> SymmetricAttentionArguments:
        """As in a step of training."""
        return SymmetricAttentionArguments(z=self.z, values=self.values, **{**self.options, "keeps": True, **given})

    def backward(self, *outputs: Tensor | None, **given: Any) -> SymmetricAttentionBackwardArguments:
        """With what the forward has returned: output, log-sum-exp and, if it was kept, the output's remainder."""
        output, log_sum_exp, remainder = (*outputs, None, None)[:3]
        assert output is not None
        assert log_sum_exp is not None
        kept = output.new_empty(0) if remainder is None else remainder
        return SymmetricAttentionBackwardArguments(
            **{**vars(self.forward()), "output": output, "log_sum_exp": log_sum_exp, "kept": kept},
            **{"grad_output": self.grad_output, **given},
        )


Results = list[Tensor | None]


def run_packed(inputs: Inputs, blocks: Blocks | None = PACKED, **needs: Any) -> Results:
    outputs = packed_forward(inputs.forward(), blocks)
    return [*outputs, *packed_backward(inputs.backward(*outputs, **needs), blocks)]


def run_streaming(
    inputs: Inputs, forward_blocks: Blocks | None = STREAMING, backward_blocks: Blocks | None = STREAMING, **needs: Any
) -> Results:
    outputs = streaming_forward(inputs.forward(), forward_blocks)
    return [*outputs[:2], *streaming_backward(inputs.backward(*outputs, **needs), backward_blocks)]


RUNS = {"packed": run_packed, "streaming": run_streaming}


def log_sum_exp(z: Tensor, lengths: Tensor | None, scale: float, energy: bool) -> Tensor:
    scores = z @ z.mT
    if energy:
        scores = scores - 0.5 * z.square().sum(-1).unsqueeze(-2)
    scores, padding = scale * scores, padding_mask(lengths, z)
    if padding is None:
        return torch.logsumexp(scores, -1)
    scores = scores.masked_fill(padding.unsqueeze(-2), float("-inf"))
    return torch.logsumexp(scores, -1).masked_fill(padding, float("inf"))


def formula(inputs: Inputs, dtype: torch.dtype) -> Results:
    """Everything that the kernels compute, by the formula in `dtype` on the CPU, differentiated by torch."""
    z = inputs.z.cpu().to(dtype).requires_grad_()
    values = None if inputs.values is None else inputs.values.cpu().to(dtype).requires_grad_()
    options = {**inputs.options, "lengths": None if inputs.lengths is None else inputs.lengths.cpu()}
    output = symmetric_attention_reference(z, values, **options)
    leaves = [z] if values is None else [z, values]
    found = torch.autograd.grad(output, leaves, inputs.grad_output.cpu().to(dtype))
    # The kernels sum the scores of narrow inputs in float32.
    log_sum = log_sum_exp(z.detach().to(torch.promote_types(dtype, torch.float32)), **options)
    return [output.detach(), log_sum, found[0], None if values is None else found[1]]


def floors(inputs: Inputs) -> list[Tensor]:
    """What the criterion allows beside the results' own sizes, as `terms` of which eps in float32 is the share.

    A logit rounds by a share of its size, in the product and in the log-sum-exp, and moves the weights by as much:
    which order of summation is lucky is chance. In float32, as the log-sum-exp is, it shows that tensor cores cut off
    what they cannot hold: after every eight products up to two units of the sum so far, which is half of the whole on
    average. And `dS = A (dOᵀV − dOᵀO)` is a difference of two sums that are equal where a token sees itself alone, and
    it enters dZ twice; torch's softmax subtracts a number from itself there.
    """
    z, upstream = inputs.z.cpu().double(), inputs.grad_output.cpu().double()
    values = z if inputs.values is None else inputs.values.cpu().double()
    scale, lengths = abs(inputs.scale), None if inputs.lengths is None else inputs.lengths.cpu()
    on_tensor_cores = inputs.z.dtype != torch.float32 or dot_precision(torch.float32) == "tf32"
    on_tensor_cores = on_tensor_cores and not cards.interpreting()
    cut_off = on_tensor_cores * z.shape[-1] / 8 * torch.finfo(torch.float32).eps / epsilon_of(torch.float32)
    logit = 2 * scale * z.square().sum(-1).amax() * torch.ones_like(z[..., 0])
    eye = torch.eye(z.shape[-2], dtype=z.dtype).expand(*z.shape[:-1], -1)
    attention = symmetric_attention_reference(z, eye, scale=inputs.scale, lengths=lengths, energy=inputs.energy)
    grad_attention = upstream @ values.mT
    grad_scores = (attention * (grad_attention - (attention * grad_attention).sum(-1, keepdim=True))).abs()
    moved = [logit.unsqueeze(-1) * factor.abs() for factor in (values, upstream)]
    moved_z = logit.unsqueeze(-1) * scale * (grad_scores + grad_scores.mT) @ z.abs()
    difference = 4 * scale * (upstream * values).abs().sum(-1, keepdim=True) * z.abs()
    share = epsilon_of(torch.float32) / epsilon_of(inputs.z.dtype)
    grad_z = share * (difference + moved_z + (moved[1] if inputs.values is None else 0.0))
    # The log-sum-exp is float32 whatever the inputs are.
    return [share * moved[0], (1 + cut_off / 2) * logit, grad_z, share * moved[1]]


def assert_is_the_formula(given: Results, inputs: Inputs, missing: tuple[int, ...] = ()) -> None:
    """Every result against float64, by the criterion of `precision`; those `missing` were not asked for."""
    plain, exact = formula(inputs, inputs.z.dtype), formula(inputs, torch.float64)
    for index, (name, terms) in enumerate(zip(NAMES, floors(inputs), strict=True)):
        mine, torchs, true = given[index], plain[index], exact[index]
        if index in missing or true is None:
            assert mine is None, name
            continue
        assert mine is not None, name
        assert torchs is not None
        assert mine.is_contiguous()
        mine = mine.cpu()
        infinite = torch.isinf(true)  # the log-sum-exp of padding
        assert torch.equal(mine[infinite].double(), true[infinite]), name
        finite = [tensor.masked_fill(infinite, 0.0) for tensor in (mine, torchs, true)]
        assert_as_precise(name, *finite, terms=terms)


# Every kernel, tied and apart, with several tiles, and a last one in part.
SOME = [
    (kernel, Shape(5, tokens, 17, values))
    for kernel, tokens in (("packed", 7), ("streaming", 19))
    for values in (None, 20)
]
LENGTHS = (3, 0, 17, 1, 99)
