"""The losses of all depths, with their options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from cdt_fast import ops
from cdt_fast.checks import check_choice, check_integer, check_number, check_positive
from cdt_fast.ops.layerwise_cross_entropy import REDUCTIONS, DepthLosses
from cdt_fast.ops.shared.checks import check_flag


class LayerwiseCrossEntropy(nn.Module):
    """Cross-entropy at every depth through one shared head, in one fused pass.

    Args:
        ignore_index, reduction, label_smoothing, softcap, chunk_tokens, inner_fraction, inner_kl, detach_last,
        per_token: as in `ops.layerwise_cross_entropy`. In evaluation mode (`eval()`) every depth reads all tokens and
            every loss is the cross-entropy, whatever `inner_fraction` and `inner_kl` are.

    Raises:
        InputError: an argument is out of its range.
    """

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum"] = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        chunk_tokens: int | None = None,
        inner_fraction: float = 1.0,
        inner_kl: float = 0.0,
        detach_last: bool = True,
        per_token: bool = False,
    ) -> None:
        super().__init__()
        self.ignore_index = check_integer("ignore_index", ignore_index, -(2**63))
        self.reduction = check_choice("reduction", reduction, REDUCTIONS)
        self.label_smoothing = check_number(
            "label_smoothing", label_smoothing, "a number in [0, 1]", lambda number: 0 <= number <= 1
        )
        self.softcap = None if softcap is None else check_positive("softcap", softcap)
        self.chunk_tokens = None if chunk_tokens is None else check_integer("chunk_tokens", chunk_tokens, 1)
        self.inner_fraction = check_number(
            "inner_fraction", inner_fraction, "a number in (0, 1]", lambda number: 0 < number <= 1
        )
        self.inner_kl = check_number("inner_kl", inner_kl, "a number in [0, 1]", lambda number: 0 <= number <= 1)
        self.detach_last = check_flag("detach_last", detach_last)
        self.per_token = check_flag("per_token", per_token)

    def forward(
        self,
        hidden_states: Sequence[Tensor],
        weight: Tensor,
        targets: Tensor | Sequence[Tensor],
        bias: Tensor | None = None,
        depth_weights: Tensor | Sequence[float] | None = None,
    ) -> DepthLosses:
        """`(total, per_depth, …)`; arguments, results and errors are those of `ops.layerwise_cross_entropy`."""
        return ops.layerwise_cross_entropy(
            hidden_states,
            weight,
            targets,
            bias,
            depth_weights=depth_weights,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            chunk_tokens=self.chunk_tokens,
            inner_fraction=self.inner_fraction if self.training else 1.0,
            inner_kl=self.inner_kl if self.training else 0.0,
            detach_last=self.detach_last,
            per_token=self.per_token,
        )

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, softcap={self.softcap}"


class LayerwiseReconstructionLoss(nn.Module):
    """The squared error of every depth's reconstruction, summed over the width and averaged over the tokens."""

    def forward(
        self,
        reconstructions: Sequence[Tensor],
        target: Tensor,
        depth_weights: Tensor | Sequence[float] | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`(total, per_depth)`; arguments, results and errors are those of `ops.layerwise_reconstruction_loss`."""
        return ops.layerwise_reconstruction_loss(reconstructions, target, depth_weights=depth_weights, lengths=lengths)
