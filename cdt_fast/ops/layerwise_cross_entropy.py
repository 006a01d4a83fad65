"""Cross-entropy at every depth against one head (docs/ops.md §5): `ℓ_l = (1/N) Σ_n CE(h_l[n] Wᵀ + b, y_n)`.

Rows of all depths go through the head in chunks whose logits fit a budget of bytes: `[depths, tokens, V]` never exists.
A chunk costs one product for its losses and two more for its gradients, with one sweep over its logits in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from cdt_fast.checks import InputError, check_choice, check_integer, check_number, check_positive
from cdt_fast.ops import common, operators, products

# Bytes of a chunk's logits: enough rows for the products to run at full speed (on a GPU thousands, also for a
# vocabulary of 128,256), and little beside the gradients.
CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 512 * 2**20}
# Depths of at most so many rows, or bytes, share a chunk, or of at most as many rows as the vocabulary has entries. It
# is faster to scale the gradients of so few hidden states than to take a second pass of small steps.
FEW_ROWS, FEW_BYTES = 512, 2**19
# Bytes, in float32, of the rows that plain torch sweeps together: its dozen steps stay in a CPU's cache.
SWEEP_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
# Rows of fewer columns are swept with the classes first, unless they are few numbers: torch's loops over so few columns
# take several times longer.
FEW_COLUMNS, FEW_NUMBERS = 32, 2**13
# On a GPU the head is padded to so many rows: for an odd vocabulary such as 50,257 cuBLAS takes kernels of the cards of
# 2018, six times slower.
COLUMN_MULTIPLE = {"cpu": 1, "cuda": 64}
# The part of a GPU's memory that a chunk's logits may take.
CARD_SHARE = 16


class HeadShard(NamedTuple):
    """The place of this rank's rows in a head that is sharded over the vocabulary."""

    group: Any  # the torch.distributed.ProcessGroup whose ranks hold the other rows
    first: int  # the class of this rank's first row
    classes: int  # V, the rows of all ranks


def layerwise_cross_entropy(
    hidden_states: Sequence[Tensor],
    weight: Tensor,
    targets: Tensor | Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    depth_weights: Tensor | Sequence[float] | None = None,
    ignore_index: int = -100,
    reduction: common.Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    class_weights: Tensor | None = None,
    shift: int = 0,
    max_tokens: int | None = None,
    chunk_tokens: int | None = None,
    shard: HeadShard | None = None,
) -> common.LayerwiseLosses:
    """Cross-entropy of every depth's hidden states through one shared head, and the weighted sum of the depths.

    With weights, one pass computes losses and gradients together, in three matrix products a chunk, and the backward
    only scales what that pass has found. Without weights, unless the head is frozen, the backward computes the logits
    again: a fourth product. So it does in float16, in which what has a small weight underflows without a loss scale.

    Args:
        hidden_states: L+1 tensors h_l, each `[..., d]`, depth 0 first. They are never stacked.
        weight: W, `[V, d]`. Its gradient is summed over chunks and depths in at least float32.
        targets: y, `[...]` int64 in [0, V), or `ignore_index`; or a list of L+1 of them, one a depth. They may stay on
            the CPU while the rest is on a GPU: then ignored tokens cost nothing there either (on the CPU they never
            do).
        bias: b, `[V]`.
        depth_weights: `w`, L+1 numbers (negative and zero are welcome). A depth with weight 0 costs its forward
            product alone and gets no gradient if the weights are numbers or a tensor on the CPU. Weights on a GPU are
            not synchronized: there such a depth gets a gradient of zeros, at full cost. A tensor that requires a
            gradient gets one.
        ignore_index: the target of tokens that do not count.
        reduction: "mean" over the tokens that count at a depth, or "sum".
        label_smoothing: ε in [0, 1]: the target distribution is `(1 − ε) [v = y] + ε / V`.
        softcap: c > 0: logits `c · tanh(logits / c)`.
        z_loss: ζ >= 0: adds `ζ λ²` to a token's loss, with λ the log-sum-exp of its logits.
        class_weights: ω, `[V]`: a token counts ω_y times, in its loss and in the number that the mean divides by.
        shift: the state of a position predicts the target so many positions later, along the last dimension of the
            targets; 1 for a language model whose labels are its input. No state is copied.
        max_tokens: an upper bound of the tokens that count at a depth. The products then run over so many rows and no
            more, also where targets on a GPU keep the host from knowing which they are.
        chunk_tokens: rows of a chunk, counted over all depths; default: as many as fit a budget of bytes.
        shard: weight and bias are this rank's rows of a head that is sharded over the vocabulary. The other arguments
            and the results are those of the whole head, the same on every rank; each chunk costs one all-gather of two
            numbers a row, and the gradients of the hidden states are summed over the ranks.

    Returns:
        `(total, per_depth)`, a named tuple, in nats, in float32 (float64 for float64). With weights:
        `total = Σ_l w_l ℓ_l` is differentiable and `per_depth`, `[L+1]`, is detached. Without: `per_depth` is
        differentiable and `total` is its plain sum.

    InputError: an argument has the wrong rank, shape, dtype, device or value; targets on the CPU are out of range, are
    all ignored if the reduction is a mean, or are more than `max_tokens`. Targets on a GPU are not waited for: one out
    of range, or one too many, makes the losses and gradients of its depths NaN, and a mean over no token is NaN with
    gradients of zero, as in torch. Or a second derivative is asked for, or one in forward mode or inside a transform of
    torch.func.

    Source: "A Constrained Optimization Perspective of Unrolled Transformers", the layerwise losses of a classifier.
    """
    _check(hidden_states, weight, targets, bias)
    classes = _check_shard(shard, weight)
    rows = classes if shard is None else -(-classes // shard.group.size())  # the same on all ranks, as their chunks are
    _check_class_weights(class_weights, classes, weight, label_smoothing)
    ignore_index = check_integer("ignore_index", ignore_index, -(2**63))
    per_depth_targets = [
        _shifted(own, check_integer("shift", shift, 0), ignore_index)
        for own in ([targets] if isinstance(targets, Tensor) else targets)
    ]
    weights = common.weights_of_depths(depth_weights, len(hidden_states))
    smoothing = check_number("label_smoothing", label_smoothing, "a number in [0, 1]", lambda number: 0 <= number <= 1)
    common.refuse_transforms("layerwise_cross_entropy", weight, bias, weights, *hidden_states)
    hidden, dtype = common.detach_zero_weighted(hidden_states, weights), common.compute_dtype(hidden_states[0])
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (weight, bias, *hidden)]
    # A classifier's gradients of the logits are smaller than those of its hidden states, which would have to be scaled.
    keeps = any(needs) and common.is_plain_eager(weight, bias, class_weights, weights, *per_depth_targets, *hidden)
    keeps = keeps and rows <= weight.shape[1] and sum(math.prod(depth.shape[:-1]) for depth in hidden) > FEW_ROWS
    one_factor = len(hidden) == 1 or not any(needs[:2])
    options = _Options(
        ignore_index=ignore_index,
        label_smoothing=smoothing,
        softcap=None
        if softcap is None
        else common.check_factor("softcap", check_positive("softcap", softcap), dtype=dtype),
        z_loss=common.check_factor("z_loss", z_loss, non_negative=True, dtype=dtype),
        max_tokens=None if max_tokens is None else check_integer("max_tokens", max_tokens, 1),
        chunk_tokens=None if chunk_tokens is None else check_integer("chunk_tokens", chunk_tokens, 1),
        mean=check_choice("reduction", reduction, get_args(common.Reduction)) == "mean",
        dtype=dtype,
        backend=common.choose_backend("layerwise_cross_entropy", weight.new_empty(0, dtype=dtype)),
        # Each gradient is a factor of what the forward can find: of all depths together, or of one alone.
        fused=any(needs) and not keeps and (one_factor if weights is None else dtype != torch.float16),
        keeps=keeps,
        needs_hidden=needs[2:],
        needs_weight=needs[0],
        needs_bias=needs[1],
        group=None if shard is None else shard.group.group_name,
        first=0 if shard is None else int(shard.first),
        classes=classes,
        rows=rows,
    )
    head = weight, None if bias is None else bias.to(weight.dtype)
    total, per_depth, *_ = _losses(hidden, *head, per_depth_targets, class_weights, weights, *options)
    return common.LayerwiseLosses(total, per_depth if weights is None else per_depth.detach().clone())


def layerwise_cross_entropy_reference(
    hidden_states: Sequence[Tensor],
    weight: Tensor,
    targets: Tensor | Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    class_weights: Tensor | None = None,
    shift: int = 0,
) -> Tensor:
    """Return the losses of the depths `[L+1]`, in any dtype, differentiated by torch."""
    losses = []
    for depth, hidden in enumerate(hidden_states):
        all_targets = targets if isinstance(targets, Tensor) else targets[depth]
        missing = 0, min(shift, hidden.shape[-2])
        all_targets = torch.nn.functional.pad(all_targets[..., shift:], missing, value=ignore_index)
        counted = all_targets != ignore_index
        logits = hidden[counted] @ weight.mT
        if bias is not None:
            logits = logits + bias
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        log_p = torch.log_softmax(logits, -1)
        at_target = log_p.gather(-1, all_targets[counted].unsqueeze(-1)).squeeze(-1)
        loss = -(1 - label_smoothing) * at_target - label_smoothing * log_p.mean(-1)
        loss = loss + z_loss * torch.logsumexp(logits, -1).square()
        times = torch.ones_like(loss) if class_weights is None else class_weights[all_targets[counted]].to(loss.dtype)
        losses.append((times * loss).sum() / (times.sum() if reduction == "mean" else 1.0))
    return torch.stack(losses)


# Arguments


class _Options(NamedTuple):
    """Resolved options; those without a comment are as in `layerwise_cross_entropy`."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    max_tokens: int | None
    chunk_tokens: int | None
    mean: bool
    dtype: torch.dtype  # of the products: their factors are cast chunk by chunk, and gradients are rounded once
    backend: str  # of the sweep over the logits of a chunk
    fused: bool  # whether the forward computes the gradients too, up to factors
    keeps: bool  # whether it keeps those of the logits alone
    needs_hidden: list[bool]
    needs_weight: bool
    needs_bias: bool
    group: str | None  # of the ranks that hold the other rows of the head
    first: int  # the class of the first row
    classes: int  # of all ranks
    rows: int  # of the head of a rank, on the average

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of losses and sums: at least float32."""
        return torch.promote_types(self.dtype, torch.float32)


def _check(states: Sequence[Tensor], weight: Tensor, targets: Tensor | Sequence[Tensor], bias: Tensor | None) -> None:
    common.check_depths("hidden_states", states, None, "as hidden_states[0]")
    first = states[0]
    shape = None, first.shape[-1]
    common.check_tensor("weight", weight, 2, "[V, d]", shape, "V by the width of the hidden states")
    if not weight.shape[0]:
        raise InputError(f"weight must hold at least one row, got shape {tuple(weight.shape)}")
    if bias is not None:
        common.check_tensor("bias", bias, 1, "[V]", weight.shape[:1], "one number a row of weight")
    common.check_together(**{f"hidden_states[{n}]": hidden for n, hidden in enumerate(states)}, weight=weight)
    common.check_together(weight=weight, bias=bias)
    expected = "an int64 tensor with one target a token"
    given: dict[str, Any] = {"targets": targets}
    if not isinstance(targets, Tensor):
        if not isinstance(targets, Sequence) or len(targets) != len(states):
            found = f"a list of {len(targets)}" if isinstance(targets, Sequence) else common.describe(targets)
            raise InputError(f"targets must be {expected}, or a list of {len(states)}, one a depth, got {found}")
        given = {f"targets[{depth}]": own for depth, own in enumerate(targets)}
    for name, own in given.items():
        if not isinstance(own, Tensor) or own.dtype != torch.int64:
            raise InputError(f"{name} must be {expected}, got {common.describe(own)}")
        common.check_shape(name, own, first.shape[:-1], "one target a token")
        if own.device != first.device and own.device.type != "cpu":
            raise InputError(f"{name} is on {own.device} but hidden_states[0] is on {first.device}: move one of them")
        if own.device != (of_first := next(iter(given.values())).device):
            raise InputError(f"{name} is on {own.device} but targets[0] is on {of_first}")


def _check_shard(shard: HeadShard | None, weight: Tensor) -> int:
    """Return the number of classes."""
    rows = weight.shape[0]
    if shard is None:
        return rows
    if not isinstance(shard, HeadShard) or not hasattr(shard.group, "group_name"):
        raise InputError(f"shard must be HeadShard(process group, first, classes), got {common.describe(shard)}")
    first, classes = check_integer("shard.first", shard.first, 0), check_integer("shard.classes", shard.classes, 1)
    if first + rows > classes:
        raise InputError(f"shard.first + the rows of weight must be at most {classes} classes, got {first} + {rows}")
    return classes


def _check_class_weights(class_weights: Tensor | None, classes: int, weight: Tensor, smoothing: float) -> None:
    if class_weights is None:
        return
    common.check_tensor("class_weights", class_weights, 1, "[V]", (classes,), "one number a class")
    if class_weights.device != weight.device or class_weights.requires_grad:
        raise InputError(f"class_weights must be on {weight.device} and require no gradient")
    if smoothing:  # where torch weights every class's part of the smoothed target by itself
        raise InputError("class_weights and label_smoothing cannot be combined")


def _shifted(targets: Tensor, shift: int, ignore_index: int) -> Tensor:
    if not shift:
        return targets
    if not targets.dim():
        raise InputError("shift needs targets of at least one dimension, got one target")
    length = targets.shape[-1]
    return torch.nn.functional.pad(targets[..., shift:], (0, min(shift, length)), value=ignore_index)


# Rows and chunks


@dataclass(frozen=True)
class _Rows:
    """The tokens that take part at some depths."""

    depths: range
    index: Tensor | None  # their numbers, [count]; None: all tokens, in order
    targets: Tensor  # [count]
    times: Tensor | None  # [count], how often each counts; None: once
    factor: float | Tensor  # of their sum, if their depth has a count of its own
    first: int  # the number of the first of these rows, len(depths) · count, among those of all depths

    @property
    def stop(self) -> int:
        return self.first + len(self.depths) * self.targets.shape[0]


@dataclass(frozen=True)
class _Chunk:
    """Rows that go through the head together: some of one depth, or whole depths side by side."""

    depths: range
    index: slice | Tensor  # the numbers of its tokens
    targets: Tensor  # [rows]
    times: Tensor | None  # [rows]
    place: slice  # of its rows among those of all depths

    def states(self, hidden: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Gather `[rows, d]` from the hidden states `[tokens, d]` of all depths."""
        own, index = hidden[self.depths.start : self.depths.stop], self.index
        parts = [depth[index] if isinstance(index, slice) else depth.index_select(0, index) for depth in own]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype)

    def per_row(self, per_depth: Tensor) -> Tensor:
        """Repeat one value for each depth to one for each row."""
        own = per_depth[self.depths.start : self.depths.stop]
        repeated = own.unsqueeze(1).expand(-1, len(self.targets) // len(own)).contiguous().view(-1)
        return repeated if self.times is None else repeated * self.times


def _select_rows(
    depths: int, weight: Tensor, targets: Sequence[Tensor], class_weights: Tensor | None, options: _Options
) -> tuple[Tensor | int, list[_Rows]]:
    """Return what the sums of the depths are divided by for means, and the tokens that take part at each depth."""
    # Ignored targets on the CPU are left out, and the count is a number. On a GPU the host would have to wait for it:
    # those beyond `max_tokens` are left out, and the others are not read but cost their share of the products.
    device, own, ignored = weight.device, len(targets) > 1, options.ignore_index
    flat = [each.reshape(-1).contiguous() for each in targets]  # may be a column of a table
    counts = [_count(each, f"targets[{n}]" if own else "targets", options) for n, each in enumerate(flat)]
    whole, most = flat[0].shape[0], options.max_tokens
    numbers: list[Tensor | int] = list(counts)
    if class_weights is not None:
        numbers = [_times(each.to(device), class_weights, options).sum() for each in flat]
    rows: list[_Rows] = []
    first = 0
    for some in (range(depth, depth + 1) for depth in range(depths)) if own else [range(depths)]:
        which = some.start if own else 0
        chosen, count, index = flat[which], counts[which], None
        factor: float | Tensor = 1.0
        if own and options.mean:
            # Every sum is divided by the number of all tokens: this replaces it by the depth's own count.
            number = numbers[which]
            factor = whole / (number.to(device, options.wide) if isinstance(number, Tensor) else number)
        if isinstance(count, int) and count < whole:
            index = (chosen != ignored).nonzero().squeeze(1)
        elif isinstance(count, Tensor) and most is not None and most < whole:
            index = torch.argsort((chosen == ignored).to(torch.int8), stable=True)[:most]
            factor = torch.where(count > most, float("nan"), factor).to(device, options.wide)
        chosen = (chosen if index is None else chosen[index]).to(device, non_blocking=True)
        index = None if index is None else index.to(device, non_blocking=True)
        times = None if class_weights is None else _times(chosen, class_weights, options)
        rows.append(_Rows(some, index, chosen, times, factor, first))
        first = rows[-1].stop
    return whole if own else numbers[0], rows


def _times(targets: Tensor, class_weights: Tensor, options: _Options) -> Tensor:
    """Return how often each token counts."""
    times = class_weights.to(options.wide)[targets.clamp(0, options.classes - 1)]
    return times.masked_fill(targets == options.ignore_index, 0.0)


def _known(targets: Tensor) -> bool:
    """Return whether the host knows the values of the targets; for a GPU's it would have to wait."""
    return targets.device.type == "cpu"


def _count(targets: Tensor, name: str, options: _Options) -> Tensor | int:
    """Return how many targets count; those on the CPU are checked."""
    ignored, classes, most = options.ignore_index, options.classes, options.max_tokens
    if not _known(targets):
        return (targets != ignored).sum()
    count = targets.numel()
    if count:
        lowest, highest = (int(end) for end in torch.aminmax(targets))
        if lowest < 0 or highest >= classes or lowest <= ignored <= highest:
            counted = targets != ignored
            wrong = targets[counted & ((targets < 0) | (targets >= classes))]
            if len(wrong):
                raise InputError(f"{name} must be in [0, {classes}) or {ignored} (ignore_index), got {wrong[0].item()}")
            count = int(counted.sum())
    if options.mean and not count:
        raise InputError(f"{name} must hold at least one token that is not {ignored} (ignore_index)")
    if most is not None and count > most:
        raise InputError(f"{name} hold {count} tokens that count, more than max_tokens={most}")
    return count


def _times_factors(per_depth: Tensor, rows: Sequence[_Rows]) -> Tensor:
    """Multiply one value for each depth by the factor of its rows."""
    if all(isinstance(some.factor, float) and some.factor == 1.0 for some in rows):
        return per_depth
    parts = per_depth.split([len(some.depths) for some in rows])
    return torch.cat([part * some.factor for part, some in zip(parts, rows, strict=True)])


def _chunks(rows: Sequence[_Rows], weight: Tensor, options: _Options, kinds: Sequence[bool]) -> Iterator[_Chunk]:
    """Yield the chunks of all rows, each of depths of one kind. A depth with more rows than a chunk is cut into equal
    parts, so that no product is left with a few rows."""
    vocabulary, width, size = options.rows, weight.shape[1], options.dtype.itemsize
    fitting = common.budget(CHUNK_BYTES, weight) // (vocabulary * size)
    # Each chunk reads and writes all of dW: on a GPU its logits have at least as many bytes. On a CPU that takes half
    # as long as the product of 128 rows in bfloat16, so there they may have a third.
    least = width * max(size, 4) // (size if weight.device.type != "cpu" else 3 * size)
    if weight.device.type in ("cuda", "meta"):
        least = min(least, common.spec_of(weight.device).memory // (CARD_SHARE * vocabulary * size))
    most = options.chunk_tokens or max(128, fitting // 128 * 128, least // 128 * 128)
    few = max(FEW_ROWS, vocabulary, FEW_BYTES // (max(1, width) * size))
    for some in rows:
        depths, count = some.depths, some.targets.shape[0]
        while depths and count:
            # Copying the states of a few rows costs less than calls of their own, or than reading and writing dW.
            together = depths[: max(1, most // count) if count <= few else 1]
            same = next((n for n, depth in enumerate(together) if kinds[depth] != kinds[together[0]]), len(together))
            size = -(-count // -(-count // most))
            before = some.first + (depths.start - some.depths.start) * count
            for start in range(0, count, size):
                tokens = slice(start, min(start + size, count))
                targets, index = some.targets[tokens], tokens if some.index is None else some.index[tokens]
                times = None if some.times is None else some.times[tokens]
                if same > 1:
                    targets = targets.expand(same, -1).contiguous().view(-1)
                    times = None if times is None else times.expand(same, -1).contiguous().view(-1)
                place = slice(before + start, before + start + len(targets))
                yield _Chunk(together[:same], index, targets, times, place)
            depths = depths[same:]


# What is done with a chunk


class _Head:
    """The head in the dtype of the products: the logits of a chunk, and the sweep over them."""

    def __init__(self, weight: Tensor, bias: Tensor | None, options: _Options) -> None:
        self._columns = weight.shape[0]
        spare = -self._columns % common.budget(COLUMN_MULTIPLE, weight)
        self.weight, self._bias = weight.to(options.dtype), None if bias is None else bias.to(options.dtype)
        if spare:
            self.weight = torch.nn.functional.pad(self.weight, (0, 0, 0, spare))
            self._bias = None if self._bias is None else torch.nn.functional.pad(self._bias, (0, spare))
        self._options, self._backend = options, options.backend
        # All chunks share memory for their logits: fresh memory of that size costs a CPU a sweep over it.
        self._buffer: Tensor | None = None

    def logits(self, x: Tensor) -> Tensor:
        """Return `x Wᵀ + b`, `[rows, padded V]`, in memory that the next call may overwrite."""
        matrix = self.weight.mT
        if products.convolves(x, matrix):
            return products.product_of_rows(x, matrix, self._bias)
        if self._buffer is None or self._buffer.shape[0] < x.shape[0]:
            self._buffer = x.new_empty(x.shape[0], self.weight.shape[0])
        out = self._buffer[: x.shape[0]]
        return products.product_of_rows(x, matrix, self._bias, out=out)

    def sweep(
        self,
        logits: Tensor,  # [rows, padded V], overwritten
        targets: Tensor,  # [rows]
        losses: Tensor | None = None,  # [rows], written
        scales: Tensor | None = None,  # [rows]: the logits become their gradient times these
    ) -> None:
        """Turn logits into losses and the gradient, as far as they are asked for."""
        options = self._options
        if options.group is None:
            self._sweep(logits, targets, losses, scales, None)
            return
        own = torch.empty(2, len(targets), dtype=options.wide, device=logits.device)
        self._sweep(logits, targets, own[1], None, own[0])
        ranks = [torch.empty_like(own) for _ in range(_group(options.group).size())]
        torch.distributed.all_gather(ranks, own, group=_group(options.group))
        parts = torch.stack(ranks)
        log_sums = torch.logsumexp(parts[:, 0], 0)
        if losses is not None:
            torch.sub(log_sums, parts[:, 1].sum(0), out=losses)
            losses.addcmul_(log_sums, log_sums, value=options.z_loss)
            losses.masked_fill_(targets == options.ignore_index, 0.0)
        if scales is not None:
            self._sweep(logits, targets, None, scales, log_sums)

    def _sweep(
        self,
        logits: Tensor,
        targets: Tensor,
        losses: Tensor | None,
        scales: Tensor | None,
        log_sums: Tensor | None,  # [rows]: λ of a shard, written, or with scales of all shards, read
    ) -> None:
        options = self._options
        if self._backend == "triton":
            with common.or_plain_torch("layerwise_cross_entropy", logits) as kernels:
                flags = options.ignore_index, options.softcap, options.label_smoothing, options.z_loss
                shard: dict[str, Any] = {"first": options.first, "classes": options.classes, "log_sums": log_sums}
                kernels.cross_entropy_(logits, self._columns, targets, losses, scales, *flags, **shard)
                return
            self._backend = "torch"
        logits = logits[:, : self._columns]
        count = max(1, common.budget(SWEEP_BYTES, logits) // (4 * logits.shape[1]))
        for start in range(0, logits.shape[0], count):
            rows = slice(start, start + count)
            vectors = [None if each is None else each[rows] for each in (losses, scales, log_sums)]
            _sweep(logits[rows], targets[rows], vectors, options)


def _group(name: str) -> Any:
    from torch.distributed import distributed_c10d

    resolve: Any = distributed_c10d._resolve_process_group  # an operator takes no group but by its name
    return resolve(name)


def _sweep(
    logits: Tensor,
    targets: Tensor,
    vectors: Sequence[Tensor | None],  # losses, scales and log_sums
    options: _Options,
) -> None:
    """Do `_Head._sweep` in plain torch."""
    losses, scales, log_sums = vectors
    smoothing, vocabulary = options.label_smoothing, logits.shape[1]
    ignored = outside = None
    if not _known(targets):  # else neither gets this far
        ignored = targets == options.ignore_index
        outside = ~ignored & ((targets < 0) | (targets >= options.classes))
        targets = targets.masked_fill(ignored | outside, 0)
    v = 0 if vocabulary < FEW_COLUMNS and logits.numel() >= FEW_NUMBERS else 1  # the dimension of the vocabulary
    here: Tensor | float = 1.0  # whether the target is in this shard
    if options.group is not None:
        targets = targets - options.first
        here = ((targets >= 0) & (targets < vocabulary)).to(options.wide)
        targets = targets.clamp(0, vocabulary - 1)
    targets = targets.unsqueeze(v)
    x = logits.to(options.wide, copy=scales is None and log_sums is not None)  # a second sweep reads the logits again
    x = x if v else x.mT.contiguous()
    slope = None
    if options.softcap is not None:
        x.div_(options.softcap).tanh_()
        slope = None if scales is None else 1.0 - x.square()
        x.mul_(options.softcap)
    if losses is not None and log_sums is not None:
        torch.logsumexp(x, v, out=log_sums)
        torch.mul(x.gather(v, targets).squeeze(v), here, out=losses).mul_(1.0 - smoothing)
        if smoothing:
            losses.add_(x.sum(v), alpha=smoothing / options.classes)
        if outside is not None:
            losses.masked_fill_(outside, float("nan"))
        return
    highest = x.amax(v) if log_sums is None and (losses is not None or options.z_loss) else None
    if losses is not None and highest is not None:
        torch.sub(highest, x.gather(v, targets).squeeze(v), out=losses)
        if smoothing:
            losses.mul_(1.0 - smoothing).add_(highest - x.mean(v), alpha=smoothing)
    if log_sums is None:
        torch.softmax(x, v, out=x)
    else:
        x.sub_(log_sums.unsqueeze(v)).exp_()
    if highest is not None:
        # The largest is exp(highest − log_sum): this saves a sum of exponentials of its own.
        above = x.amax(v).log_()
        log_sums = highest - above if options.z_loss else None
        if losses is not None:
            losses.sub_(above)
            if log_sums is not None:
                losses.addcmul_(log_sums, log_sums, value=options.z_loss)
            if ignored is not None and outside is not None:
                losses.masked_fill_(ignored, 0.0).masked_fill_(outside, float("nan"))
    if scales is None:
        return
    # x holds the probabilities.
    if options.z_loss and log_sums is not None:
        x.mul_((2.0 * options.z_loss * log_sums + 1.0).unsqueeze(v))
    if smoothing:
        x.sub_(smoothing / options.classes)
    # In float32 before the rounding: in bfloat16 p − 1 of a confident token would be noise.
    if isinstance(here, Tensor):
        x.scatter_add_(v, targets, (here * (smoothing - 1.0)).unsqueeze(v))
    else:
        x.scatter_(v, targets, smoothing - 1.0, reduce="add")
    if slope is not None:
        x.mul_(slope)
    if ignored is not None and outside is not None:
        scales = scales.masked_fill(outside, float("nan"))
        x.mul_(scales.unsqueeze(v)).masked_fill_((ignored | (scales == 0)).unsqueeze(v), 0.0)
    else:
        x.mul_(scales.unsqueeze(v))
    if x is not logits:
        logits.copy_(x if v else x.mT)


class _Gradients:
    """The gradients that are needed, to which chunks are added; zero at the depths that are not `on`. `G W` of the
    hidden states of each depth; `Gᵀ x` of the head, in at least float32: in bfloat16 a long sum stops growing; and `Σ
    G` over the chunks, of which there may be many, in float64."""

    def __init__(
        self, hidden: Sequence[Tensor], weight: Tensor, rows: Sequence[_Rows], on: Sequence[bool], options: _Options
    ) -> None:
        self._weight, self._wide, self._group = weight, options.wide, options.group
        complete = all(some.index is None and some.targets.shape[0] for some in rows)
        self._of_hidden = [
            (depth.new_empty if complete and one else depth.new_zeros)(depth.shape) if need else None
            for depth, need, one in zip(hidden, options.needs_hidden, on, strict=True)
        ]
        # A convolution takes the wider factor as it is, and finds the gradient columns first.
        turned = weight.shape[0] > weight.shape[1] and products.is_convolved(weight)
        size = weight.shape[::-1] if turned else weight.shape
        of_weight = weight.new_empty(size, dtype=self._wide) if options.needs_weight else None
        self._of_weight = of_weight.mT if turned and of_weight is not None else of_weight
        self._is_new = True  # the first chunk writes it: zeros would be written and read for nothing
        summed = self._wide if weight.device.type == "mps" else torch.float64  # which mps does not have
        self._of_bias = weight.new_zeros(weight.shape[0], dtype=summed) if options.needs_bias else None

    def add(self, chunk: _Chunk, gradient: Tensor, x: Tensor) -> None:
        """Add a chunk: the gradient of its logits `[rows, padded V]`, and its states `[rows, d]`."""
        if self._of_weight is not None:
            products.add_product(self._of_weight, gradient, x, overwrite=self._is_new)
            self._is_new = False
        if self._of_bias is not None:
            self._of_bias.add_(gradient.sum(0, dtype=self._wide))
        outputs, index = [self._of_hidden[depth] for depth in chunk.depths], chunk.index
        if all(output is None for output in outputs):
            return
        first = outputs[0]
        alone = len(outputs) == 1 and isinstance(index, slice) and first is not None and first.dtype == gradient.dtype
        into = first[index] if alone and first is not None else None
        # One product for all depths, which reads the weight once.
        product = products.product_of_rows(gradient, self._weight, out=into)
        if product is into:
            return
        for output, own in zip(outputs, product.chunk(len(outputs)), strict=True):
            if output is not None and isinstance(index, slice):
                output[index] = own
            elif output is not None and isinstance(index, Tensor):
                output.index_copy_(0, index, own.to(output.dtype))

    def found(self, shape: torch.Size, columns: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the gradients that are needed: of the hidden states, in `shape`, then of the head's `columns` rows, in
        `dtype`."""
        of_hidden = [gradient.view(shape) for gradient in self._of_hidden if gradient is not None]
        if self._group is not None:
            for gradient in of_hidden:
                torch.distributed.all_reduce(gradient, group=_group(self._group))
        if self._of_weight is not None and self._is_new:
            self._of_weight.zero_()
        of_head = [gradient for gradient in (self._of_weight, self._of_bias) if gradient is not None]
        return of_hidden + [gradient[:columns].to(dtype).contiguous() for gradient in of_head]


# The op


@common.outside_autocast
def _forward(
    hidden: list[Tensor],  # [..., d] each
    weight: Tensor,
    bias: Tensor | None,
    targets: list[Tensor],  # one tensor, or one a depth
    class_weights: Tensor | None,  # [V]
    depth_weights: Tensor | None,  # [depths]
    *flat: Any,  # options
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the total `[]`, the losses `[depths]`, a factor `[]`, and what the backward starts from: if it is fused,
    the gradients that are needed, of sums over the tokens; else, if they are kept, those of the logits `[rows, V]`.

    The factor, one over the number of tokens or one, waits for the backward so that a loss scale meets it: in float16
    the quotients alone would underflow.
    """
    options = _Options(*flat)
    device, wide, depths = weight.device, options.wide, len(hidden)
    number, rows = _select_rows(depths, weight, targets, class_weights, options)
    head, matrices = _Head(weight, bias, options), [common.rows_of(depth) for depth in hidden]
    losses = torch.empty(rows[-1].stop, dtype=wide, device=device)
    weights = torch.ones(depths, dtype=wide, device="cpu") if depth_weights is None else depth_weights.detach()
    on = [options.fused and not zero for zero in common.zero_weight_mask(weights)]
    weights = common.on_device(weights, device, wide)
    scales = _times_factors(weights, rows)
    gradients = _Gradients(matrices, head.weight, rows, on, options) if options.fused else None
    kept = [head.weight.new_empty(rows[-1].stop, head.weight.shape[0])] if options.keeps else []
    for chunk in _chunks(rows, head.weight, options, on):
        place, x = chunk.place, chunk.states(matrices, options.dtype)
        logits = head.logits(x)
        if gradients is not None and on[chunk.depths.start]:
            head.sweep(logits, chunk.targets, losses[place], chunk.per_row(scales))
            gradients.add(chunk, logits, x)
        else:
            head.sweep(logits, chunk.targets, losses[place], torch.ones_like(losses[place]) if kept else None)
        if chunk.times is not None:
            losses[place].mul_(chunk.times)
        if kept:
            kept[0][place] = logits
    sums = [losses[some.first : some.stop].view(len(some.depths), -1).sum(1) for some in rows]
    per_depth = _times_factors(torch.cat(sums), rows)
    factor = torch.ones((), dtype=wide, device=device)
    if options.mean:
        number = number if isinstance(number, int) else number.to(device, wide, non_blocking=True)
        per_depth = per_depth / number
        factor = factor / (number if isinstance(number, int) else torch.where(number == 0, 1.0, number))
    total = torch.dot(weights, per_depth)
    found = kept if gradients is None else gradients.found(hidden[0].shape, len(weight), wide)
    return total, per_depth, factor, found


def _forward_fake(hidden: list[Tensor], weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    options = _Options(*others[4:])
    losses = weight.new_empty(len(hidden), dtype=options.wide)
    found = _empty_gradients(hidden, weight, options, options.wide) if options.fused else []
    return losses.new_empty(()), losses, losses.new_empty(()), found


@common.outside_autocast
def _gradients(
    factors: Tensor,  # [depths]; one that is known to be zero gives zeros even where the gradients are NaN
    kept: Tensor | None,  # the gradients of the logits
    hidden: list[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    targets: list[Tensor],
    class_weights: Tensor | None,
    *flat: Any,  # options
) -> list[Tensor]:
    """Return the gradients that are needed, if the forward is not fused."""
    options = _Options(*flat)
    _, rows = _select_rows(len(hidden), weight, targets, class_weights, options)
    head, matrices = _Head(weight, bias, options), [common.rows_of(depth) for depth in hidden]
    scales, off = _times_factors(factors, rows), common.zero_weight_mask(factors)
    gradients = _Gradients(matrices, head.weight, rows, [not zero for zero in off], options)
    for chunk in _chunks(rows, head.weight, options, off):
        if off[chunk.depths.start]:
            continue
        x, factor = chunk.states(matrices, options.dtype), chunk.per_row(scales)
        if kept is None:
            logits = head.logits(x)
            head.sweep(logits, chunk.targets, scales=factor)
        else:
            logits = torch.mul(own := kept[chunk.place], factor.unsqueeze(1), out=torch.empty_like(own))
        gradients.add(chunk, logits, x)
    return gradients.found(hidden[0].shape, len(weight), weight.dtype)


def _empty_gradients(hidden: Sequence[Tensor], weight: Tensor, options: _Options, dtype: torch.dtype) -> list[Tensor]:
    """Make the gradients that are needed; those of the head are of this dtype."""
    found = [depth.new_empty(depth.shape) for depth in operators.compress(hidden, options.needs_hidden)]
    shapes = [weight.shape] * options.needs_weight + [weight.shape[:1]] * options.needs_bias
    return found + [weight.new_empty(shape, dtype=dtype) for shape in shapes]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    hidden, weight, bias, targets, class_weights, depth_weights, *flat = inputs
    _, per_depth, factor, found = output
    ctx.options = _Options(*flat)
    # What is found stays differentiable, so that a second derivative of a fused call is seen, and refused.
    ctx.mark_non_differentiable(factor)
    ctx.depths, ctx.own_targets, ctx.weight_dtype = len(hidden), len(targets), weight.dtype
    # The gradients of a fused forward have the weights in them.
    inputs = () if ctx.options.fused else (weight, bias, class_weights, *targets, *hidden)
    ctx.save_for_backward(factor, per_depth, depth_weights, *inputs, *found)


def _backward(ctx: Any, grad_total: Tensor | None, grad_per_depth: Tensor | None, *_: Any) -> tuple[Any, ...]:
    """Return the gradients of the inputs up to the weights of the depths."""
    factor, per_depth, weights, *saved = ctx.saved_tensors
    options, depths = ctx.options, ctx.depths
    factors = factor.new_zeros(depths)
    for grad in (grad_total, grad_per_depth):
        factors = factors if grad is None else factors + grad * factor
    if not options.fused and weights is not None:  # then there is no other gradient than that of the total
        factors = factors * weights.to(factors)
    plain = common.is_plain_eager(factors, *saved)
    needs = [*options.needs_hidden, options.needs_weight, options.needs_bias]
    found: list[Tensor] = []
    if options.fused:
        off = common.zero_weight_mask(factors) if plain else [False] * depths  # whose factor is known to be zero
        places = [(depth, None) for depth, need in enumerate(options.needs_hidden) if need]
        places += 2 * [(0, ctx.weight_dtype)]  # if the head has gradients, all factors are the same
        for gradient, (depth, dtype) in zip(saved, places, strict=False):
            # Out of place, so that a second backward finds them as they were.
            found.append(torch.empty_like(gradient, dtype=dtype))
            if off[depth]:  # also if the gradient is NaN
                found[-1].zero_()
            else:  # with a dimension the factor takes part in the promotion: the products are rounded once
                torch.mul(gradient, factors[depth : depth + 1], out=found[-1])
    elif any(needs):
        weight, bias, class_weights, *saved = saved
        targets, saved = saved[: ctx.own_targets], saved[ctx.own_targets :]
        hidden, kept = saved[:depths], saved[depths] if options.keeps else None
        differentiate = _gradients if plain else _gradients_operator
        tensors = factors, kept, hidden, weight, bias, targets, class_weights
        found = differentiate(*tensors, *options)
    *of_hidden, of_weight, of_bias = operators.scatter(found, needs)
    of_weights = (grad_total * per_depth).to(weights) if ctx.needs_input_grad[5] and grad_total is not None else None
    return of_hidden, of_weight, of_bias, [None] * ctx.own_targets, None, of_weights


_HEAD = "Tensor weight, Tensor? bias, Tensor[] targets, Tensor? class_weights"
_OPTIONS = ", ".join(f"{kind.__forward_arg__} {name}" for name, kind in _Options.__annotations__.items())
_losses = operators.differentiable(
    *("layerwise_cross_entropy", _forward, _forward_fake, _setup_context, _backward),
    f"(Tensor[] hidden, {_HEAD}, Tensor? depth_weights, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor[])",
)
_gradients_operator = operators.define(
    "layerwise_cross_entropy_backward",
    _gradients,
    lambda _, kept, hidden, weight, *others: _empty_gradients(hidden, weight, _Options(*others[3:]), weight.dtype),
    f"(Tensor factors, Tensor? kept, Tensor[] hidden, {_HEAD}, {_OPTIONS}) -> Tensor[]",
)
