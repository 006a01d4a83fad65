"""The chunk loop of the layerwise cross-entropy: rows of all depths against one head, never `[depths, tokens, V]`.

A pass goes over the rows that take part, depth after depth, in chunks whose logits fit a budget of bytes. A chunk
costs one product for its losses and two more for its gradients; between them lies one sweep over its logits, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cdt_fast.ops.cross_entropy_chunks import Head, Piece, Rows, plan

# Bytes of the float32 product that is added to dW where the operands are narrower: all of it at once would double dW.
PRODUCT_BYTES = 256 * 2**20
# Tensor cores want rows that start at multiples of 16 bytes: an odd vocabulary such as 50,257 would lose half the rate.
COLUMN_MULTIPLE = 64

# Bytes, in float32, of the rows that the sweep in plain torch takes together: its dozen steps stay in a CPU's cache.
SWEEP_BYTES = 4 * 2**20

# (head, logits, targets, losses, log_sums, scales): losses and log-sum-exps where losses are given, else the latter are
# read; the gradient over the logits where scales are given.
RowSweep = Callable[[Head, Tensor, Tensor, "Tensor | None", Tensor, "Tensor | None"], None]


@dataclass(frozen=True)
class Pass:
    """What a pass leaves.

    Attributes:
        sums: `[depths]`, the losses summed over the tokens; zeros where the log-sum-exps were given.
        log_sums: `[depths, tokens]`, the log-sum-exp of each row that took part, in the order of its `Rows`.
        hidden: the gradients of the hidden states, None at those not asked for.
        weight, bias: the gradients of the head in at least float32, None where not asked for.
    """

    sums: Tensor
    log_sums: Tensor
    hidden: list[Tensor | None]
    weight: Tensor | None
    bias: Tensor | None


def one_pass(
    hidden: Sequence[Tensor],
    head: Head,
    rows: Sequence[Rows],
    sweep: RowSweep,
    *,
    most: int,
    log_sums: Tensor | None = None,
    scales: Sequence[Tensor | None] | None = None,
    wants_hidden: Sequence[bool] | None = None,
    wants_weight: bool = False,
    wants_bias: bool = False,
) -> Pass:
    """Losses of every depth, or gradients, or both at once.

    Args:
        hidden: `[tokens, d]` each, of any float dtype and strides.
        head: the head, whose dtype is that of the products.
        rows: the tokens that take part at each depth.
        sweep: what turns a chunk of logits into losses and gradients.
        most: rows of a chunk.
        log_sums: those of a pass before: then no losses are computed.
        scales: what the gradients of a depth's rows are multiplied by; None at depths without a gradient.
        wants_hidden, wants_weight, wants_bias: the gradients to compute; zeros where no depth has a scale.
    """
    depths, tokens = len(hidden), len(hidden[0])
    wanted = [False] * depths if wants_hidden is None else wants_hidden
    scaled = [
        scale if want or wants_weight or wants_bias else None
        for scale, want in zip(scales or [None] * depths, wanted, strict=True)
    ]
    backward_only = log_sums is not None
    chunks = plan(
        [
            0 if backward_only and scale is None else len(depth.targets)
            for depth, scale in zip(rows, scaled, strict=True)
        ],
        [(scale is None, want) for scale, want in zip(scaled, wanted, strict=True)],
        most,
    )
    wide = torch.promote_types(head.weight.dtype, torch.float32)
    losses = torch.zeros(depths, tokens, device=head.weight.device, dtype=wide)
    log_sums = torch.zeros_like(losses) if log_sums is None else log_sums
    gradients = [
        _room_for_gradient(hidden[depth], rows[depth].index is None and scaled[depth] is not None) if want else None
        for depth, want in enumerate(wanted)
    ]
    of_head = _HeadGradients(head.weight, wants_weight, wants_bias)
    widest = max((sum(piece.stop - piece.start for piece in chunk) for chunk in chunks), default=0)
    buffer = _logits_buffer(head.weight, widest)
    for chunk in chunks:
        x = _joined([_rows_of(hidden[piece.depth], rows[piece.depth], piece) for piece in chunk]).to(head.weight.dtype)
        logits = buffer[: len(x)]
        if head.bias is None:
            torch.mm(x, head.weight.mT, out=logits)
        else:
            torch.addmm(head.bias, x, head.weight.mT, out=logits)
        chunk_log_sums = _joined([piece.of(log_sums[piece.depth]) for piece in chunk])
        chunk_losses = None if backward_only else torch.empty_like(chunk_log_sums)
        sweep(
            head,
            logits,
            _joined([piece.of(rows[piece.depth].targets) for piece in chunk]),
            chunk_losses,
            chunk_log_sums,
            _row_scales(chunk, scaled),
        )
        if chunk_losses is not None:
            for piece, part in _parts(chunk, chunk_losses):
                piece.of(losses[piece.depth]).copy_(part)
            for piece, part in _parts(chunk, chunk_log_sums):
                piece.of(log_sums[piece.depth]).copy_(part)
        if scaled[chunk[0].depth] is not None:
            of_head.add(logits, x)
            if wanted[chunk[0].depth]:
                _write_gradients(chunk, logits, head.weight, gradients, rows)
    return Pass(losses.sum(1), log_sums, gradients, *of_head.result())


class _HeadGradients:
    """`dW += Gᵀ x` and `db += Σ G` over the chunks, in at least float32: in bfloat16 a long sum stops growing."""

    def __init__(self, weight: Tensor, wants_weight: bool, wants_bias: bool) -> None:
        self._wide = torch.promote_types(weight.dtype, torch.float32)
        self._like = weight
        self._wants_weight = wants_weight
        self._weight: Tensor | None = None
        self._bias = weight.new_zeros(weight.shape[0], dtype=self._wide) if wants_bias else None

    def add(self, gradient: Tensor, x: Tensor) -> None:
        """Add a chunk: the gradient of its logits `[rows, V]`, and its hidden states `[rows, d]`."""
        if self._bias is not None:
            self._bias += gradient.sum(0, dtype=self._wide)
        if not self._wants_weight:
            return
        if self._weight is None:
            self._weight = torch.empty_like(self._like, dtype=self._wide, memory_format=torch.contiguous_format)
            beta = 0
        else:
            beta = 1
        if self._wide == x.dtype:
            torch.addmm(self._weight, gradient.mT, x, beta=beta, out=self._weight)
            return
        size = max(1, PRODUCT_BYTES // (x.shape[1] * self._wide.itemsize))
        for start in range(0, len(self._weight), size):
            total, factor = self._weight[start : start + size], gradient[:, start : start + size].mT
            # A CPU has no product of narrow factors with a float32 result: there a chunk's part is rounded once.
            product = torch.mm(factor, x, out_dtype=self._wide) if x.is_cuda else torch.mm(factor, x)
            if beta:
                total += product
            else:
                total.copy_(product)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of weight and bias, None where they are not wanted."""
        if self._wants_weight and self._weight is None:
            self._weight = torch.zeros_like(self._like, dtype=self._wide, memory_format=torch.contiguous_format)
        return self._weight, self._bias


def _room_for_gradient(hidden: Tensor, covered: bool) -> Tensor:
    """A contiguous tensor for the gradient; with zeros in it where the chunks will not write every row."""
    make = torch.empty_like if covered else torch.zeros_like
    return make(hidden, memory_format=torch.contiguous_format)


def _write_gradients(
    chunk: Sequence[Piece],
    gradient: Tensor,
    weight: Tensor,
    gradients: Sequence[Tensor | None],
    rows: Sequence[Rows],
) -> None:
    """The gradients of the hidden states of a chunk: `G W`, straight into place where place and dtype allow it."""
    first = chunk[0]
    room = gradients[first.depth]
    if len(chunk) == 1 and room is not None and room.dtype == weight.dtype and rows[first.depth].index is None:
        torch.mm(gradient, weight, out=first.of(room))
        return
    for piece, part in _parts(chunk, torch.mm(gradient, weight)):
        room, index = gradients[piece.depth], rows[piece.depth].index
        assert room is not None
        if index is None:
            piece.of(room).copy_(part)
        else:
            room.index_copy_(0, piece.of(index), part.to(room.dtype))


def _logits_buffer(weight: Tensor, rows: int) -> Tensor:
    """`[rows, V]`, used again by every chunk: fresh memory of that size costs a CPU as much as the sweep over it."""
    columns = weight.shape[0]
    padded = -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE if weight.is_cuda else columns
    return weight.new_empty(rows, padded)[:, :columns]


def _rows_of(hidden: Tensor, rows: Rows, piece: Piece) -> Tensor:
    return piece.of(hidden) if rows.index is None else hidden.index_select(0, piece.of(rows.index))


def _row_scales(chunk: Sequence[Piece], scales: Sequence[Tensor | None]) -> Tensor | None:
    """`[rows]`: the scale of each row's depth, or None for a chunk without gradients."""
    found = [(scales[piece.depth], piece.stop - piece.start) for piece in chunk]
    return (
        torch.cat([scale.expand(count) for scale, count in found if scale is not None])
        if found[0][0] is not None
        else None
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _parts(chunk: Sequence[Piece], joined: Tensor) -> list[tuple[Piece, Tensor]]:
    """What `_joined` has put together, taken apart."""
    return list(zip(chunk, joined.split([piece.stop - piece.start for piece in chunk]), strict=True))


def sweep_on_triton(
    head: Head, logits: Tensor, targets: Tensor, losses: Tensor | None, log_sums: Tensor, scales: Tensor | None
) -> None:
    """The sweep as one kernel, a program a row."""
    from cdt_fast.kernels.cross_entropy import cross_entropy_

    cross_entropy_(
        logits,
        targets,
        losses,
        log_sums,
        scales,
        ignore_index=head.ignore_index,
        softcap=head.softcap,
        smoothing=head.smoothing,
    )


class TorchSweep:
    """The sweep in plain torch, in place and in at least float32; keeps what it needs beside the logits."""

    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}

    def __call__(
        self,
        head: Head,
        logits: Tensor,
        targets: Tensor,
        losses: Tensor | None,
        log_sums: Tensor,
        scales: Tensor | None,
    ) -> None:
        count = max(1, SWEEP_BYTES // (4 * logits.shape[1]))
        parts = [
            [None] * -(-len(logits) // count) if tensor is None else tensor.split(count)
            for tensor in (logits, targets, losses, log_sums, scales)
        ]
        for part in zip(*parts, strict=True):
            self._sweep(head, *part)

    def _sweep(
        self,
        head: Head,
        logits: Tensor,
        targets: Tensor,
        losses: Tensor | None,
        log_sums: Tensor,
        scales: Tensor | None,
    ) -> None:
        ignored = targets == head.ignore_index
        outside = ~ignored & ((targets < 0) | (targets >= logits.shape[1]))
        places = targets.masked_fill(ignored | outside, 0).unsqueeze(1)
        x = logits if logits.dtype.itemsize >= 4 else self._room("wide", logits).copy_(logits)
        logs, slope = x, None
        if head.softcap is not None:
            x.div_(head.softcap).tanh_()
            if scales is not None:
                logs, slope = self._room("logs", x).copy_(x), x.square_().neg_().add_(1.0)
            logs.mul_(head.softcap)
        if losses is None:
            probabilities = logs.sub_(log_sums.unsqueeze(1)).exp_()
        else:
            highest = logs.amax(1)
            below = (highest - logs.gather(1, places).squeeze(1)).mul_(1.0 - head.smoothing)
            if head.smoothing:
                below.add_(highest - logs.mean(1), alpha=head.smoothing)
            probabilities = torch.softmax(logs, 1, out=logs)
            # The largest is exp(highest − log_sum): this saves a sum of exponentials of its own.
            above = probabilities.amax(1).log_().neg_()
            torch.add(highest, above, out=log_sums)
            torch.add(below, above, out=losses)
            losses.masked_fill_(ignored, 0.0).masked_fill_(outside, float("nan"))
        if scales is None:
            return
        if head.smoothing:
            probabilities.sub_(head.smoothing / logits.shape[1])
        # In float32 before the rounding: in bfloat16 p − 1 of a confident token would be noise.
        probabilities.scatter_(1, places, probabilities.gather(1, places).add_(head.smoothing - 1.0))
        if slope is not None:
            probabilities.mul_(slope)
        probabilities.mul_(scales.masked_fill(outside, float("nan")).unsqueeze(1))
        if logits.device.type != "cpu":  # on the CPU neither ignored rows nor switched-off depths get this far
            probabilities.masked_fill_((ignored | (scales == 0)).unsqueeze(1), 0.0)
        if probabilities is not logits:
            logits.copy_(probabilities)

    def _room(self, name: str, like: Tensor) -> Tensor:
        """Memory of the shape of `like` in at least float32, the same one in every call."""
        room = self._rooms.get(name)
        if room is None or len(room) < len(like):
            dtype = torch.promote_types(like.dtype, torch.float32)
            room = self._rooms[name] = torch.empty(like.shape, dtype=dtype, device=like.device)
        return room[: len(like)]
