"""`symmetric_attention` as an operator with a gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cdt_fast.kernels.arguments import SymmetricAttentionArguments, SymmetricAttentionBackwardArguments
from cdt_fast.kernels.blocks import LONGEST
from cdt_fast.ops.shared.registration import Operator, by_formula, save, saved
from cdt_fast.ops.symmetric_attention.plain import backward_in_torch, forward_in_torch, room_to_keep
from cdt_fast.ops.symmetric_attention.reference import symmetric_attention_reference


def _forward(attention: SymmetricAttentionArguments) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the rows' log-sum-exp `[B, T]`, which the kernels' backward starts from (else empty), and what else
    is kept for a backward: in plain torch the attention, of a kernel the remainder of the output (else empty)."""
    z = attention.z
    if attention.backend == "triton":
        from cdt_fast.kernels.symmetric_attention import symmetric_attention_forward

        output, log_sum_exp, kept = symmetric_attention_forward(attention)
        return output, log_sum_exp, output.new_empty(0) if kept is None else kept
    kept = room_to_keep(attention)
    output = forward_in_torch(attention, kept)
    return output, z.new_empty(0, dtype=torch.promote_types(z.dtype, torch.float32)), kept


def _forward_fake(attention: SymmetricAttentionArguments) -> tuple[Tensor, Tensor, Tensor]:
    z, on_triton = attention.z, attention.backend == "triton"
    output = torch.empty_like(z if attention.values is None else attention.values)
    log_sum_exp = z.new_empty(z.shape[:-1] if on_triton else (0,), dtype=torch.promote_types(z.dtype, torch.float32))
    if not on_triton:
        return output, log_sum_exp, room_to_keep(attention)
    keeps = attention.keeps and z.element_size() == 2 and z.shape[1] > LONGEST
    return output, log_sum_exp, output.new_empty(output.shape if keeps else (0,))


def _backward(attention: SymmetricAttentionBackwardArguments) -> list[Tensor]:
    """The gradients that are needed, of z first."""
    if attention.backend == "triton":
        from cdt_fast.kernels.symmetric_attention import symmetric_attention_backward

        return [gradient for gradient in symmetric_attention_backward(attention) if gradient is not None]
    if attention.log_sum_exp.numel():  # the forward was a kernel's, which has kept something else
        wide = torch.promote_types(attention.z.dtype, torch.float32)
        attention = replace(attention, kept=attention.z.new_empty(0, dtype=wide))
    return backward_in_torch(attention)


def _backward_fake(attention: SymmetricAttentionBackwardArguments) -> list[Tensor]:
    z, values = attention.z, attention.values
    gradients = [torch.empty_like(z)] if attention.needs_z else []
    return [*gradients, torch.empty_like(values)] if attention.needs_values and values is not None else gradients


def _setup_context(ctx: Any, attention: SymmetricAttentionArguments, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    output, log_sum_exp, kept = outputs
    ctx.mark_non_differentiable(log_sum_exp, kept)
    save(
        ctx,
        **vars(attention),
        output=output,
        log_sum_exp=log_sum_exp,
        kept=kept,
        needs_z=ctx.needs["z"],
        needs_values=bool(ctx.needs["values"]),
    )


def _autograd(ctx: Any, grad_output: Tensor, *_: None) -> list[Tensor]:
    attention = SymmetricAttentionBackwardArguments(grad_output=grad_output.contiguous(), **saved(ctx))
    return symmetric_attention_backward(attention)


def _formula(attention: SymmetricAttentionArguments) -> tuple[Tensor, Tensor, Tensor]:
    z, options = attention.z, {name: getattr(attention, name) for name in ("scale", "lengths", "energy")}
    output = by_formula(symmetric_attention_reference, z, attention.values, **options)
    return output, z.new_empty(0), z.new_empty(0)


symmetric_attention_forward = Operator(
    "symmetric_attention",
    SymmetricAttentionArguments,
    "(Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    _setup_context,
    _autograd,
    _formula,
)
symmetric_attention_backward = Operator(
    "symmetric_attention_backward", SymmetricAttentionBackwardArguments, "Tensor[]", _backward, _backward_fake
)
