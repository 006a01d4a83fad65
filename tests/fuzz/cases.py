"""Random cases of the ops."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.ops.layerwise_cross_entropy import layerwise_cross_entropy_reference
from cdt_fast.ops.layerwise_reconstruction_loss import layerwise_reconstruction_loss_reference
from cdt_fast.ops.lista_step import lista_step_reference
from cdt_fast.ops.residual_linear import residual_linear_reference
from cdt_fast.ops.soft_threshold import soft_threshold_reference
from cdt_fast.ops.symmetric_attention import symmetric_attention_reference
from cdt_fast.ops.unrolled_layer import unrolled_layer_reference

Function = Callable[..., Sequence[Tensor]]


@dataclass
class Case:
    """An op, its formula, and what both are called with.

    Attributes:
        op, formula: of the tensors, by name.
        tensors: the arguments that have a gradient.
        options: the other arguments of the public function, for what is broken on purpose.
        call: the public function.
        kinks: the gradient jumps where a number of the first result becomes zero.
        decided: where the result itself jumps there (`T_θ`): θ, and the formula with the choice made, which is given
            by what of the first result is kept.
        limits: other values, in this case, of the sizes from which on an op computes otherwise.
        samples: the tensors, and `outputs` the number of results, whose first dimension counts samples.
        padding: `[...]`, true at tokens that count nowhere.
    """

    call: Callable[..., Any]
    op: Function
    formula: Function
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    kinks: bool = False
    decided: tuple[float, Callable[[Tensor], Function]] | None = None
    limits: dict[str, int] = field(default_factory=dict)
    samples: tuple[str, ...] = ()
    outputs: int = 0
    padding: Tensor | None = None
    padded: tuple[str, ...] = field(default=())


class Chance(random.Random):
    """Random numbers, shapes and tensors of a case."""

    def width(self) -> int:
        return self.choice([self.randint(1, 8), self.randint(1, 8), self.randint(0, 2), self.choice([16, 17, 33, 65])])

    def tokens(self) -> int:
        return self.choice([self.randint(1, 7), self.randint(1, 7), 0, self.choice([16, 31, 70])])

    def long(self) -> int:
        """Tokens of an attention; once in a thousand so many that its scores take two panels."""
        return 2050 if self.random() < 0.001 else self.tokens()

    def limits(self, *names: str) -> dict[str, int]:
        """In a third of the cases sizes are judged as if all of them were large."""
        return {name: self.choice([1, 300]) for name in names if self.random() < 0.7} if self.random() < 0.3 else {}

    def leading(self) -> tuple[int, ...]:
        return self.choice([(), (self.randint(1, 3),), (2, self.randint(0, 2))])

    def counted(self) -> tuple[int, ...]:
        """Leading dimensions and tokens; none at all in a case of twenty, as a loss refuses that."""
        while 0 in (shape := (*self.leading(), self.tokens())) and self.random() < 0.95:
            pass
        return shape

    def dtype(self, backend: str) -> torch.dtype:
        kinds = [torch.float32, torch.bfloat16, torch.float16]
        return self.choice(kinds if backend == "triton" else [*kinds, torch.float64])

    def tensor(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Numbers of one size between 1/30 and 10, some of them zero, in one of the ways they can lie in memory."""
        generator = torch.Generator().manual_seed(self.randrange(2**31))
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64) * 10 ** self.uniform(-1.5, 1)
        if self.random() < 0.3:
            tensor *= torch.rand(shape, generator=generator) < 0.7
        tensor = tensor.to(dtype)
        way = self.randrange(5)
        if way == 0 and len(shape) > 1:
            return tensor.mT.contiguous().mT
        if way == 1 and shape:
            buffer = tensor.new_full((*shape[:-1], 2 * shape[-1] + 1), float("nan"))
            buffer[..., 1::2] = tensor
            return buffer[..., 1::2]
        if way == 2 and len(shape) > 1 and shape[0]:
            return tensor[:1].expand(shape)
        return tensor

    def lengths(self, shape: tuple[int, ...]) -> Tensor | None:
        *leading, tokens = shape
        if self.random() < 0.4:
            return None
        generator = torch.Generator().manual_seed(self.randrange(2**31))
        lengths = torch.randint(0, tokens + 3, leading, generator=generator)
        return lengths.to(self.choice([torch.int64, torch.int32, torch.int8, torch.uint8, torch.int16]))

    def targets(self, shape: tuple[int, ...], vocabulary: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.randrange(2**31))
        targets = torch.randint(0, vocabulary, shape, generator=generator)
        return targets.masked_fill(torch.rand(shape, generator=generator) < self.choice([0, 0, 0.3, 0.9]), -100)

    def weights(self, count: int) -> list[float] | None:
        numbers = [self.choice([0.0, 1.0, -0.5, self.uniform(-2, 2), 1e-3]) for _ in range(count)]
        return self.choice([None, numbers])


def _padding(lengths: Tensor | None, tokens: tuple[int, ...]) -> Tensor | None:
    return None if lengths is None else torch.arange(tokens[-1]) >= lengths.long().unsqueeze(-1)


PLAIN = "cdt_fast.ops.symmetric_attention.plain"
ATTENTION_LIMITS = (f"{PLAIN}.PANEL_BYTES", f"{PLAIN}.KEPT_BYTES", f"{PLAIN}.COST_OF_A_LENGTH")


def attention(chance: Chance, dtype: torch.dtype) -> Case:
    shape = (*chance.leading(), chance.long())
    options = {
        "scale": chance.choice([1.0, 0.0, -0.3, chance.uniform(0, 1), 5.0]),
        "energy": chance.random() < 0.3,
        "lengths": chance.lengths(shape),
    }
    tensors = {"z": chance.tensor(dtype, *shape, chance.width())}
    if chance.random() < 0.5:
        tensors["values"] = chance.tensor(dtype, *shape, chance.width())
    return Case(
        ops.symmetric_attention,
        lambda **given: [ops.symmetric_attention(**given, **options)],
        lambda **given: [symmetric_attention_reference(**given, **options)],
        tensors,
        options,
        limits=chance.limits(*ATTENTION_LIMITS),
        samples=tuple(tensors),
        outputs=1,
        padding=_padding(options["lengths"], shape),
        padded=tuple(tensors),
    )


def _lista(chance: Chance) -> dict[str, Any]:
    return {
        "step": chance.choice([0.1, 0.0, chance.uniform(0, 1)]),
        "threshold": chance.choice([0.1, 0.0, chance.uniform(0, 1), 1e5]),
        "nonlinearity": chance.choice(["soft_threshold", "hard_threshold", "relu"]),
    }


def _decided(options: dict[str, Any], without: Callable[..., Tensor]) -> dict[str, Any]:
    """Of a case with one result: what it says of kinks; `without` is its formula without a nonlinearity."""
    if options["nonlinearity"] != "hard_threshold" or not options["threshold"]:
        return {"kinks": True}  # T_0 is the identity

    def formula(kept: Tensor) -> Function:
        return lambda **given: [without(**given).masked_fill(~kept, 0.0)]

    return {"decided": (options["threshold"], formula)}


def lista_step(chance: Chance, dtype: torch.dtype) -> Case:
    shape, n, m, options = (*chance.leading(), chance.tokens()), chance.width(), chance.width(), _lista(chance)
    tensors = {"codes": (*shape, m), "signal": (*shape, n), "dictionary": (n, m)}
    return Case(
        ops.lista_step,
        lambda **given: [ops.lista_step(**given, **options)],
        lambda **given: [lista_step_reference(**given, **options)],
        {name: chance.tensor(dtype, *size) for name, size in tensors.items()},
        options,
        **_decided(options, partial(lista_step_reference, **options | {"threshold": 0.0})),
        samples=("codes", "signal"),
        outputs=1,
    )


def residual_linear(chance: Chance, dtype: torch.dtype) -> Case:
    shape, n, m = (*chance.leading(), chance.tokens()), chance.width(), chance.width()
    options = {
        "alpha": chance.choice([1.0, 0.0, chance.uniform(-2, 2)]),
        "nonlinearity": chance.choice(["relu", "soft_threshold", "hard_threshold", "identity"]),
        "threshold": chance.choice([0.0, chance.uniform(0, 1), 1e5]),
    }
    bias = chance.random() < 0.4
    tensors = {"x": (*shape, n), "weight": (n, m), "residual": (m,) if bias else (*shape, m)}
    return Case(
        ops.residual_linear,
        lambda **given: [ops.residual_linear(**given, **options)],
        lambda **given: [residual_linear_reference(**given, **options)],
        {name: chance.tensor(dtype, *size) for name, size in tensors.items()},
        options,
        **_decided(options, partial(residual_linear_reference, **options | {"threshold": 0.0})),
        samples=("x",) if bias else ("x", "residual"),
        outputs=1,
    )


def soft_threshold(chance: Chance, dtype: torch.dtype) -> Case:
    options = {"threshold": chance.choice([0.0, chance.uniform(0, 2), 1e5])}
    return Case(
        ops.soft_threshold,
        lambda x: [ops.soft_threshold(x, **options)],
        lambda x: [soft_threshold_reference(x, **options)],
        {"x": chance.tensor(dtype, *chance.leading(), chance.tokens(), chance.width())},
        options,
        kinks=True,
        samples=("x",),
        outputs=1,
    )


def unrolled_layer(chance: Chance, dtype: torch.dtype) -> Case:
    shape, n, m, k = (*chance.leading(), chance.long()), chance.width(), chance.width(), chance.width()
    options = {**_lista(chance), "scale": chance.choice([1.0, 0.0, chance.uniform(0, 0.5)])}
    options["lengths"] = chance.lengths(shape)
    tensors = {"codes": (*shape, m), "signal": (*shape, n), "dictionary": (n, m)}
    if chance.random() < 0.5:
        tensors["next_dictionary"] = (k, m)

    def without(**given: Any) -> Tensor:
        linear: dict[str, Any] = {**given, **options, "threshold": 0.0}
        return unrolled_layer_reference(**linear)[0]

    def with_projection(codes: Function) -> Function:
        def formula(**given: Tensor) -> Sequence[Tensor]:
            (kept,) = codes(**given)
            return [kept, kept @ given.get("next_dictionary", given["dictionary"]).mT]

        return formula

    kinks = _decided(options, without)
    if "decided" in kinks:
        threshold, formula = kinks["decided"]
        kinks["decided"] = threshold, lambda kept: with_projection(formula(kept))
    return Case(
        ops.unrolled_layer,
        lambda **given: ops.unrolled_layer(**given, **options),
        lambda **given: unrolled_layer_reference(**given, **options),
        {name: chance.tensor(dtype, *size) for name, size in tensors.items()},
        options,
        **kinks,
        limits=chance.limits(*ATTENTION_LIMITS, "cdt_fast.ops.unrolled_layer.composed.HELD_SCORE_BYTES"),
        samples=("codes", "signal"),
        outputs=2,
        padding=_padding(options["lengths"], shape),
        padded=("codes", "signal"),
    )


def _depths(given: dict[str, Any]) -> list[Any]:
    return [given.pop(name) for name in sorted(given) if name.startswith("depth_") and name != "depth_weights"]


def reconstruction_of_depths(target: Any, **given: Any) -> Any:
    return ops.layerwise_reconstruction_loss(_depths(given), target, **given)


def cross_entropy_of_depths(targets: Any, weight: Any, **given: Any) -> Any:
    return ops.layerwise_cross_entropy(_depths(given), weight, targets, **given)


def reconstruction_loss(chance: Chance, dtype: torch.dtype) -> Case:
    shape, depths = chance.counted(), chance.randint(1, 4)
    lengths, weights, width = chance.lengths(shape), chance.weights(depths), chance.width()
    padding = _padding(lengths, shape)
    names = [f"depth_{number}" for number in range(depths)]

    def split(given: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        return [given[name] for name in names], given["target"]

    def op(**given: Tensor) -> Sequence[Tensor]:
        total, losses = ops.layerwise_reconstruction_loss(*split(given), depth_weights=weights, lengths=lengths)
        return [total] if weights is not None else [total, losses]

    def formula(**given: Tensor) -> Sequence[Tensor]:
        depths, target = split(given)
        if padding is not None:
            depths, target = [depth[~padding] for depth in depths], target[~padding]
        losses = layerwise_reconstruction_loss_reference(depths, target)
        if weights is None:
            return [losses.sum(), losses]
        on = [number for number, weight in enumerate(weights) if weight]
        return [sum((weights[number] * losses[number] for number in on), 0.0 * target.sum())]  # type: ignore[list-item]

    return Case(
        reconstruction_of_depths,
        op,
        formula,
        {name: chance.tensor(dtype, *shape, width) for name in [*names, "target"]},
        {"depth_weights": None, "lengths": lengths},
        padding=padding,
        padded=(*names, "target"),
    )


def cross_entropy(chance: Chance, dtype: torch.dtype) -> Case:
    shape, depths = chance.counted(), chance.randint(1, 4)
    width, vocabulary = chance.width(), chance.choice([1, 2, 7, 33, 130])
    options = {
        "reduction": chance.choice(["mean", "sum"]),
        "label_smoothing": chance.choice([0.0, 0.1, 1.0]),
        "softcap": chance.choice([None, None, 1.0, 30.0]),
        "inner_kl": chance.choice([0.0, 0.0, 1.0, chance.uniform(0, 1)]),
        "detach_last": chance.random() < 0.7,
    }
    own_targets = not options["inner_kl"] and chance.random() < 0.3
    targets = [chance.targets(shape, vocabulary) for _ in range(depths if own_targets else 1)]
    counted = torch.stack(targets) != -100
    own = {"chunk_tokens": chance.choice([None, 1, 3]), "per_token": chance.random() < 0.3}
    given_targets = targets if own_targets else targets[0]
    names = [f"depth_{number}" for number in range(depths)]
    tensors = {name: chance.tensor(dtype, *shape, width) for name in names}
    tensors["weight"] = chance.tensor(dtype, vocabulary, width)
    if chance.random() < 0.5:
        tensors["bias"] = chance.tensor(dtype, vocabulary)
    weighted = chance.choice(["", "numbers", "depths", "tokens"])
    if weighted in ("depths", "tokens"):  # in a tensor, and so with a gradient
        tensors["depth_weights"] = chance.tensor(dtype, depths, *(shape if weighted == "tokens" else ()))
    numbers = [chance.choice([0.0, 1.0, -0.5, 1e-3]) for _ in names]

    def weights(given: dict[str, Tensor]) -> Any:
        return given.get("depth_weights", numbers if weighted else None)

    def op(**given: Tensor) -> Sequence[Tensor]:
        hidden, weight, bias = [given[name] for name in names], given["weight"], given.get("bias")
        found = ops.layerwise_cross_entropy(
            hidden, weight, given_targets, bias, depth_weights=weights(given), **options, **own
        )
        results = [found.total] if weighted else [found.total, found.per_depth]
        if found.token_losses is not None and found.log_sum_exp is not None and found.arg_max is not None:
            assert torch.equal(found.arg_max >= 0, counted.expand(depths, *shape))
            results += [one + 0.0 * found.total for one in (found.token_losses, found.log_sum_exp)]
        return results

    def formula(**given: Tensor) -> Sequence[Tensor]:
        hidden, weight, bias = [given[name] for name in names], given["weight"], given.get("bias")
        tokens = layerwise_cross_entropy_reference(
            hidden, weight, given_targets, bias, **{**options, "reduction": "none"}
        )
        number = counted.flatten(1).sum(1).expand(depths) if options["reduction"] == "mean" else torch.ones(depths)
        of_tokens = tokens / number.to(tokens.dtype).view(-1, *[1] * len(shape))
        losses = of_tokens.flatten(1).sum(1)
        results = [losses.sum(), losses]
        if weighted:
            by = given.get("depth_weights", torch.tensor(numbers, dtype=tokens.dtype))
            results = [(by * (of_tokens if by.dim() > 1 else losses)).sum()]
        if own["per_token"]:
            log_sums = torch.stack([_log_sum_exp(depth, weight, bias, options["softcap"]) for depth in hidden])
            results += [one.detach() + 0.0 * results[0] for one in (tokens, log_sums.masked_fill(~counted, 0.0))]
        return results

    return Case(
        lambda **given: cross_entropy_of_depths(given_targets, **given),
        op,
        formula,
        tensors,
        options | own | {"depth_weights": None, "inner_fraction": 1.0, "ignore_index": -100},
        padding=~counted.any(0),
        padded=tuple(names),
    )


def _log_sum_exp(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    logits = hidden @ weight.mT
    logits = logits if bias is None else logits + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return logits[..., 0] - torch.log_softmax(logits, -1)[..., 0]


CASES: dict[str, Callable[[Chance, torch.dtype], Case]] = {
    "symmetric_attention": attention,
    "lista_step": lista_step,
    "residual_linear": residual_linear,
    "soft_threshold": soft_threshold,
    "unrolled_layer": unrolled_layer,
    "layerwise_reconstruction_loss": reconstruction_loss,
    "layerwise_cross_entropy": cross_entropy,
}
