"""What every op has to satisfy, through its public function alone: cases, formulas written a second time, criteria."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cdt_fast import ops

LAYOUTS = ("contiguous", "transposed", "inside a poisoned buffer")
LOW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOSSES = ("layerwise_reconstruction_loss", "layerwise_cross_entropy")
DEPTHS = ("h0", "h1", "h2")

# What may be added to the tensors of a case, and the values that its options take; of each the first is the default.
EXTRAS: dict[str, tuple[str, ...]] = {
    "soft_threshold": ("thresholds",),
    "lista_step": (),
    "residual_linear": ("bias",),
    "symmetric_attention": ("values", "lengths"),
    "unrolled_layer": ("first", "projection", "next_dictionary", "target", "lengths"),
    "denoising_layer": ("numbers of sequences",),
    "layerwise_reconstruction_loss": ("lengths", "weights"),
    "layerwise_cross_entropy": ("bias", "weights", "targets of depths", "class weights"),
}
SHRINKAGE = {"threshold": (0.1, 0.0, 0.6), "nonlinearity": ("soft_threshold", "relu")}
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "soft_threshold": {"threshold": (0.3, 0.0, 3.0)},
    "lista_step": {"step": (0.2, 0.05), **SHRINKAGE},
    "residual_linear": {"alpha": (0.5, -0.5, 0.0), **SHRINKAGE, "nonlinearity": ("relu", "soft_threshold", "identity")},
    "symmetric_attention": {"scale": (0.7, -0.5, 0.0), "energy": (False, True)},
    "unrolled_layer": {"step": (0.3, 0.05), **SHRINKAGE, "scale": (1.0, 0.25, -0.5)},
    "denoising_layer": {},
    "layerwise_reconstruction_loss": {"reduction": ("mean", "sum")},
    "layerwise_cross_entropy": {
        "reduction": ("mean", "sum"),
        "label_smoothing": (0.0, 0.1),
        "softcap": (None, 2.0),
        "z_loss": (0.0, 0.05),
        "shift": (0, 1),
        "chunk_tokens": (None, 1, 4),
    },
}
NAMES = tuple(OPTIONS)
# By what is added to the smallest call: the cases of the tests that do not draw any.
VARIANTS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    **{name: (name, (), {}) for name in NAMES},
    "soft_threshold of a tensor": ("soft_threshold", ("thresholds",), {}),
    "residual_linear with a bias": ("residual_linear", ("bias",), {"nonlinearity": "soft_threshold"}),
    "symmetric_attention with all": ("symmetric_attention", ("values", "lengths"), {"energy": True}),
    "unrolled_layer with all": ("unrolled_layer", EXTRAS["unrolled_layer"][1:], {"nonlinearity": "relu", "scale": 0.5}),
    "unrolled_layer without codes": ("unrolled_layer", ("first", "projection", "target"), {"threshold": 0.0}),
    "denoising_layer with numbers of sequences": ("denoising_layer", EXTRAS["denoising_layer"], {}),
    "layerwise_reconstruction_loss with all": (
        "layerwise_reconstruction_loss",
        ("lengths", "weights"),
        {"reduction": "sum"},
    ),
    "layerwise_cross_entropy with all": (
        *("layerwise_cross_entropy", EXTRAS["layerwise_cross_entropy"][:3]),
        {"label_smoothing": 0.1, "softcap": 2.0, "z_loss": 0.05, "shift": 1, "chunk_tokens": 4},
    ),
    "layerwise_cross_entropy with class weights": (
        *("layerwise_cross_entropy", ("targets of depths", "class weights")),
        {"z_loss": 0.05},
    ),
}
# These are made of torch's own functions, which torch differentiates.
OPERATORS = tuple(name for name, (op, _, _) in VARIANTS.items() if op not in ("soft_threshold", "denoising_layer"))
PADDED = tuple(name for name, (_, extras, _) in VARIANTS.items() if "lengths" in extras)
OF_SAMPLES = tuple(name for name in OPERATORS if VARIANTS[name][0] not in LOSSES)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int | torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    source = seed if isinstance(seed, torch.Generator) else generator(seed)
    return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Case:
    """A call: the tensors that are differentiated, float64 as they are made, and everything else."""

    op: str
    tensors: dict[str, Tensor]
    options: dict[str, Any]

    def to(self, *where: Any) -> Case:
        """On another device or in another dtype; the target of a layer too, integers on the device alone."""
        moved = {name: tensor.to(*where) for name, tensor in self.tensors.items()}
        device = next(iter(moved.values())).device

        def other(value: Any) -> Any:
            if isinstance(value, list):
                return [other(each) for each in value]
            if not isinstance(value, Tensor):
                return value
            return value.to(*where) if value.is_floating_point() else value.to(device)

        return replace(self, tensors=moved, options={name: other(value) for name, value in self.options.items()})


def build(op: str, *extras: str, **options: Any) -> Case:
    """Build a case with the `extras` of `EXTRAS`, and the options given in place of the defaults of `OPTIONS`.

    Its sizes are options too: `leading`, `tokens`, `width`, `atoms`, and the `seed` of its values.
    """
    sizes = {"seed": 0, "leading": (2,), "tokens": 3, "width": 4, "atoms": 5}
    seed, leading, tokens, width, atoms = (options.pop(name, default) for name, default in sizes.items())
    source, rows = generator(seed), (*leading, tokens)
    options = {name: values[0] for name, values in OPTIONS[op].items()} | options
    tensors: dict[str, Tensor] = {}
    if op == "soft_threshold":
        tensors["x"] = normal(source, *rows, width)
        if "thresholds" in extras:
            del options["threshold"]
            tensors["threshold"] = 0.1 + normal(source, width).abs()
    elif op == "lista_step":
        tensors["codes"], tensors["signal"] = normal(source, *rows, atoms), normal(source, *rows, width)
        tensors["dictionary"] = normal(source, width, atoms) / max(1, width) ** 0.5
    elif op == "residual_linear":
        tensors["x"] = normal(source, *rows, width)
        tensors["weight"] = normal(source, width, atoms) / max(1, width) ** 0.5
        tensors["residual"] = normal(source, *(() if "bias" in extras else rows), atoms)
    elif op == "symmetric_attention":
        tensors["z"] = normal(source, *rows, width) / max(1, width) ** 0.25
        if "values" in extras:
            tensors["values"] = normal(source, *rows, atoms)
    elif op == "unrolled_layer":
        options["codes"] = None
        if "first" not in extras:
            del options["codes"]
            tensors["codes"] = normal(source, *rows, atoms)
        tensors["signal"] = normal(source, *rows, width)
        tensors["dictionary"] = normal(source, width, atoms) / max(1, width) ** 0.5
        if "projection" in extras:
            tensors["projection"] = normal(source, *rows, width) / max(1, width) ** 0.25
        if "next_dictionary" in extras:
            tensors["next_dictionary"] = normal(source, width + 2, atoms) / max(1, atoms) ** 0.5
        if "target" in extras:
            options["target"] = normal(source, *rows, width + 2 * ("next_dictionary" in extras))
    elif op == "denoising_layer":
        tensors |= {name: normal(source, *rows, width) for name in ("signal", "features")}
        tensors["dictionary"] = normal(source, width, atoms) / max(1, width) ** 0.5
        tensors["thresholds"] = 0.5 + normal(source, atoms).abs()
        numbers = {"scale": 0.3, "self_bias": 0.5, "sharpness": 2.0}
        tensors |= {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
        if extras:
            tensors |= {name: 0.3 + normal(source, *leading).abs() for name in ("scale", "factor")}
    else:
        tensors |= {name: normal(source, *rows, width) for name in DEPTHS}
        if op == "layerwise_reconstruction_loss":
            tensors["target"] = normal(source, *rows, width)
        else:
            tensors["weight"] = normal(source, atoms, width)
            if "bias" in extras:
                tensors["bias"] = normal(source, atoms)
            options["targets"] = [torch.randint(atoms, (*rows, 2), generator=source)[..., 0] for _ in DEPTHS]
            options["shift"] *= tokens > 1
            for targets in options["targets"]:  # a third is ignored, and the first one counts
                targets[torch.rand(rows, generator=source) < 0.33] = -100
                targets.view(-1)[: 1 + options["shift"]] = 0
            if "class weights" in extras:
                options["class_weights"] = torch.rand(atoms, generator=source, dtype=torch.float64) + 0.1
                options["label_smoothing"] = 0.0  # cannot be combined
            if "targets of depths" not in extras:
                options["targets"] = options["targets"][0]
        if "weights" in extras:
            tensors["depth_weights"] = torch.tensor([0.5, -0.25, 2.0], dtype=torch.float64)
    if "lengths" in extras:
        lengths = torch.randint(0, tokens + 2, leading, generator=source)
        options["lengths"] = lengths.clamp(min=1) if op in LOSSES else lengths
    return Case(op, tensors, options)


def call(case: Case, tensors: dict[str, Tensor] | None = None) -> list[Any]:
    """The outputs of the public function."""
    given = {**(case.tensors if tensors is None else tensors), **case.options}
    function = getattr(ops, case.op)
    if case.op in LOSSES:
        found = function([given.pop(name) for name in DEPTHS], **given)
        return list(found[:2])
    found = function(**given)
    return [found] if isinstance(found, Tensor) else [output for output in found if output is not None]


# The formulas: the op's own reference, and one that shares no line with it


def formula(case: Case, tensors: dict[str, Tensor], written: bool = False) -> list[Tensor]:
    """The outputs by `<op>_reference`, or by formulas that are `written` here, in the dtype of the tensors."""
    op, given, options = case.op, dict(tensors), dict(case.options)
    module = importlib.import_module(f"cdt_fast.ops.{op}")
    reference = getattr(module, f"{op}_reference")
    if op in LOSSES:
        weights = given.pop("depth_weights", options.pop("depth_weights", None))
        losses = (written_losses if written else of_reference)(op, reference, given, options)
        if weights is None:
            return [losses.sum(), losses]
        return [torch.dot(torch.as_tensor(weights, dtype=losses.dtype, device=losses.device), losses), losses.detach()]
    if op == "unrolled_layer":
        target, lengths = options.pop("target", None), options.get("lengths")
        # The reference forms the projection itself.
        written = written or "projection" in given
        outputs = list((written_layer if written else reference)(**given, **options))
        if target is not None:
            wide = torch.promote_types(outputs[1].dtype, torch.float32)
            error = (outputs[1].to(wide) - target.to(wide)).square()
            outputs.append(error[counted(lengths, outputs[1])].sum())
        return outputs
    if op == "denoising_layer":
        return list((written_denoising if written else reference)(**given))
    others = {"lista_step": written_step, "residual_linear": written_linear, "symmetric_attention": written_mixture}
    others |= {"soft_threshold": lambda x, threshold: written_shrinkage(x, threshold, "soft_threshold")}
    return [(others[op] if written else reference)(**given, **options)]


def of_reference(op: str, reference: Callable[..., Tensor], given: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """The losses of the depths by the reference, which knows no lengths and no chunks."""
    depths = [given.pop(name) for name in DEPTHS]
    if op == "layerwise_cross_entropy":
        options.pop("chunk_tokens")
        return reference(depths, **given, **options)
    kept = counted(options.get("lengths"), given["target"])
    losses = reference([depth[kept] for depth in depths], given["target"][kept])
    return losses * kept.sum() if options["reduction"] == "sum" else losses


def counted(lengths: Tensor | None, rows: Tensor) -> Tensor:
    """`[..., T]`, true at tokens that are not padding."""
    if lengths is None:
        return torch.ones(rows.shape[:-1], dtype=torch.bool, device=rows.device)
    return torch.arange(rows.shape[-2], device=rows.device) < lengths.unsqueeze(-1)


def without_padding(rows: Tensor, lengths: Tensor | None) -> Tensor:
    return torch.where(counted(lengths, rows).unsqueeze(-1), rows, 0.0)


def written_attention(z: Tensor, scale: float, lengths: Tensor | None = None, energy: bool = False) -> Tensor:
    """`[..., T, T]`, a sequence at a time, from exponentials alone; zero rows and columns at padding."""
    tokens, width = z.shape[-2:]
    sequences = z.reshape(z.shape[:-2].numel(), tokens, width)
    counts = [tokens] * len(sequences) if lengths is None else lengths.reshape(-1).tolist()
    matrices = []
    for sequence, count in zip(sequences, counts, strict=True):
        matrix = 0.0 * (sequence @ sequence.T)
        if count and tokens:
            kept = sequence[:count]
            scores = scale * (kept @ kept.T)
            if energy:
                scores = scores - scale * 0.5 * (kept * kept).sum(1)
            weights = torch.exp(scores - scores.max(1, keepdim=True).values.detach())
            padding = tokens - len(kept)
            matrix = torch.nn.functional.pad(weights / weights.sum(1, keepdim=True), (0, padding, 0, padding))
        matrices.append(matrix)
    return (torch.stack(matrices) if matrices else z.new_zeros(0)).reshape(*z.shape[:-1], tokens)


def written_mixture(
    z: Tensor, values: Tensor | None = None, *, scale: float, energy: bool, lengths: Tensor | None = None
) -> Tensor:
    values = z if values is None else values
    z, values = without_padding(z, lengths), without_padding(values, lengths)
    return written_attention(z, scale, lengths, energy) @ values


def written_shrinkage(x: Tensor, threshold: float | Tensor, nonlinearity: str) -> Tensor:
    if nonlinearity == "identity" or (nonlinearity != "relu" and isinstance(threshold, float) and threshold == 0):
        return x
    zero = torch.zeros_like(x)
    if nonlinearity == "relu":
        return torch.where(x > 0, x, zero)
    return torch.where(x > threshold, x - threshold, torch.where(x < -threshold, x + threshold, zero))


def written_step(
    codes: Tensor, signal: Tensor, dictionary: Tensor, *, step: float, threshold: float, nonlinearity: str
) -> Tensor:
    residual = signal - torch.einsum("...m,nm->...n", codes, dictionary)
    return written_shrinkage(
        codes + step * torch.einsum("...n,nm->...m", residual, dictionary), threshold, nonlinearity
    )


def written_linear(
    x: Tensor, weight: Tensor, residual: Tensor, *, alpha: float, threshold: float, nonlinearity: str
) -> Tensor:
    return written_shrinkage(residual + alpha * torch.einsum("...n,nm->...m", x, weight), threshold, nonlinearity)


def written_denoising(
    signal: Tensor,
    features: Tensor,
    dictionary: Tensor,
    thresholds: Tensor,
    scale: Tensor,
    self_bias: Tensor,
    sharpness: Tensor,
    factor: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The layer by the distances of the features, and the gate by exponentials."""
    scale, factor = (torch.as_tensor(each)[..., None, None] for each in (scale, factor))
    distances = (features.unsqueeze(-2) - features.unsqueeze(-3)).square().sum(-1)
    alike = torch.exp(-0.5 * scale * distances - self_bias * torch.eye(distances.shape[-1], dtype=distances.dtype))
    attention = alike / alike.sum(-1, keepdim=True)
    left = torch.einsum("...ij,...ij->...i", attention, attention).sqrt().unsqueeze(-1)
    codes = torch.einsum("...ij,...jn,nm->...im", attention, signal, dictionary)
    gate = 1 / (1 + torch.exp(sharpness - sharpness * (codes / (left * factor * thresholds)) ** 2))
    return torch.einsum("...m,nm->...n", codes * gate, dictionary), ((left * gate) ** 2).sum(-1)


def written_layer(
    codes: Tensor | None,
    signal: Tensor,
    dictionary: Tensor,
    *,
    step: float,
    threshold: float,
    scale: float,
    nonlinearity: str,
    projection: Tensor | None = None,
    lengths: Tensor | None = None,
    next_dictionary: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The layer by its docstring, with the projection as a variable of its own where it is given."""
    codes = step * signal @ dictionary if codes is None else codes
    codes, signal = without_padding(codes, lengths), without_padding(signal, lengths)
    projection = codes @ dictionary.T if projection is None else without_padding(projection, lengths)
    attention = written_attention(projection, scale, lengths)
    update = attention @ codes + step * ((signal - attention @ projection) @ dictionary)
    next_codes = written_shrinkage(without_padding(update, lengths), threshold, nonlinearity)
    return next_codes, next_codes @ (dictionary if next_dictionary is None else next_dictionary).T


def written_losses(op: str, _: Any, given: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Of the depths: squares one by one, or exponentials alone with the distribution of the targets spelled out."""
    losses = []
    for number, depth in enumerate(given[name] for name in DEPTHS):
        if op == "layerwise_reconstruction_loss":
            kept = counted(options.get("lengths"), depth)
            summed = ((depth - given["target"]) ** 2 * kept.unsqueeze(-1)).sum()
        else:
            targets = options["targets"]
            targets = targets if isinstance(targets, Tensor) else targets[number]
            smoothing, softcap = options["label_smoothing"], options["softcap"]
            if options["shift"]:
                depth, targets = depth[..., :-1, :], targets[..., 1:]
            kept, weight = targets != -100, given["weight"]
            times = options.get("class_weights", torch.ones(len(weight), dtype=weight.dtype))[targets[kept]]
            wanted = torch.full((int(kept.sum()), len(weight)), smoothing / len(weight), dtype=weight.dtype)
            wanted[torch.arange(len(wanted)), targets[kept]] += 1 - smoothing
            logits = torch.einsum("nd,vd->nv", depth[kept], weight) + given.get("bias", 0.0)
            if softcap is not None:
                decay = torch.exp(-2 * logits / softcap)
                logits = softcap * (1 - decay) / (1 + decay)
            total = torch.exp(logits).sum(1, keepdim=True)
            each = options["z_loss"] * torch.log(total[:, 0]) ** 2 - (
                wanted * torch.log(torch.exp(logits) / total)
            ).sum(1)
            kept, summed = times, (times * each).sum()
        losses.append(summed / kept.sum() if options["reduction"] == "mean" else summed)
    return torch.stack(losses)


def variant(name: str, **sizes: Any) -> Case:
    op, extras, options = VARIANTS[name]
    return build(op, *extras, **options, **sizes)


# Places in memory


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values with other strides; around the poisoned ones lies NaN, so that a read outside shows."""
    if layout == "contiguous" or tensor.dim() < 2:
        return tensor.contiguous()
    if layout == "transposed":
        return tensor.mT.contiguous().mT
    *leading, rows, columns = tensor.shape
    buffer = tensor.new_full((*leading, rows + 2, 2 * columns + 1), float("nan"))
    inside = buffer[..., 1:-1, 1::2]
    inside.copy_(tensor)
    return inside


def between_nan(tensor: Tensor, margin: int = 3) -> Tensor:
    """The same values, contiguous, with `margin` NaN directly before and behind; an odd one leaves no row aligned."""
    buffer = tensor.new_full((tensor.numel() + 2 * margin,), float("nan"))
    inside = buffer[margin : margin + tensor.numel()].view(tensor.shape)
    inside.copy_(tensor)
    return inside


def leaf(tensor: Tensor, layout: str = "contiguous") -> Tensor:
    return laid_out(tensor.detach(), layout).requires_grad_()


def leaves_of(case: Case) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in case.tensors.items()}


# The criteria


def upstream_of(output: Tensor, layout: str = "contiguous", seed: int = 1) -> Tensor:
    """A gradient in one of the `LAYOUTS`, or with "stride 0", as that of a sum is; eighths, which every dtype holds."""
    if layout == "stride 0":
        return torch.tensor(0.625, dtype=output.dtype, device=output.device).expand(output.shape)
    drawn = torch.randint(-8, 9, output.shape, generator=generator(seed)) / 8
    return laid_out(drawn.to(output), layout)


def differentiate(
    outputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    layout: str = "contiguous",
    skip: int | None = None,
    **options: Any,
) -> list[Tensor]:
    """The gradients of all leaves from all outputs that have one but number `skip`; zeros where nothing arrives."""
    used = {n: output for n, output in enumerate(outputs) if output.requires_grad and n != skip}
    given = [upstream_of(output, layout, seed) for seed, output in used.items()]
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if used:
        found = torch.autograd.grad(list(used.values()), leaves, given, allow_unused=True, **options)
    return [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(leaves, found, strict=True)]


def results(case: Case, function: Callable[..., list[Tensor]] = call) -> list[Tensor]:
    """The outputs by `call` or by `formula`, and the gradients of all tensors from all of them."""
    leaves = leaves_of(case)
    outputs = function(case, leaves)
    return [*outputs, *differentiate(outputs, list(leaves.values()))]


def assert_close(given: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-12) -> None:
    """Equal up to `tolerance` of the largest value (at least 1), and finite."""
    for index, (one, other) in enumerate(zip(given, expected, strict=True)):
        assert one.shape == other.shape, f"number {index}: {one.shape} against {other.shape}"
        assert torch.isfinite(one).all(), f"number {index} is not finite"
        if one.numel():
            error = (one - other).abs().max().item()
            assert error <= tolerance * max(1.0, other.abs().max().item()), f"number {index} is off by {error}"


def assert_equal(given: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Bit for bit the same; NaN equals NaN."""
    for index, (one, other) in enumerate(zip(given, expected, strict=True)):
        assert one.dtype == other.dtype, f"number {index}"
        assert torch.equal(one.nan_to_num(1e30), other.nan_to_num(1e30)), f"number {index}"
        assert torch.equal(one.isnan(), other.isnan()), f"number {index}"


def rounded(case: Case, epsilon: float, seed: int) -> Case:
    """Each number off by `epsilon` of its size, up or down."""
    source = generator(seed)
    signs = {name: torch.randint(0, 2, tensor.shape, generator=source) for name, tensor in case.tensors.items()}
    moved = {name: tensor * (1 + epsilon * (2 * signs[name] - 1)) for name, tensor in case.tensors.items()}
    return replace(case, tensors=moved)


def assert_as_precise_as_torch(
    cases: Iterator[Case],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    autocast: bool = False,
    draws: int = 4,
    placed: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    products: float | None = None,
) -> None:
    """Errors against float64 at most 1.5 times those of the same formula in plain torch at `dtype`, plus a rounding.

    Of so many `draws` of the same sizes, forward and backward, every output and every gradient on its own; the root
    mean square and the maximum are pooled, as a single case can be lucky. The float64 result is exact for the inputs
    that all get: `dtype` holds them (under autocast: float32). Draws in which rounding moves a code across a kink are
    left out, since it is chance what that does to a gradient.

    Args:
        cases: of one op.
        dtype: of the tensors, or of autocast.
        device: where the op runs.
        autocast: whether the tensors are float32, and the op is called under autocast.
        draws: how many are pooled.
        placed: puts a tensor into memory.
        products: eps of the numbers that kernels multiply and sum, in an order of their own. They round scores and
            their log-sum-exp, in the forward and again in the backward: four times, what the result changes by when
            every input is off by that is allowed as well.
    """
    held = torch.float32 if autocast else dtype
    epsilon = max(torch.finfo(dtype).eps, products or 0.0)
    runs: list[tuple[list[Tensor], ...]] = []
    names: list[str] = []

    def run(function: Callable[..., list[Tensor]], case: Case, narrow: bool = False) -> list[Tensor]:
        leaves = {name: placed(tensor.detach()).requires_grad_() for name, tensor in case.tensors.items()}
        with torch.autocast(torch.device(device).type, dtype=dtype, enabled=narrow):
            outputs = function(case, leaves)
        if function is call:
            given = {output.dtype for output in outputs if output.dim() and case.op not in LOSSES}
            assert given <= {held if case.op == "soft_threshold" else dtype}
        elif narrow:  # where nothing but additions touch a result eager autocast leaves it wide
            outputs = [output.to(dtype) for output in outputs]
        gradients = differentiate(outputs, list(leaves.values()))
        assert [gradient.dtype for gradient in gradients] == [leaf.dtype for leaf in leaves.values()]
        names[:] = [*(f"output {index}" for index in range(len(outputs))), *(f"gradient of {name}" for name in leaves)]
        return [tensor.detach().cpu() for tensor in (*outputs, *gradients)]

    for attempt, case in enumerate(cases):
        assert attempt < 40 * draws, "rounding nearly always moves a code across a kink"
        exact, here = case.to(held).to(torch.float64), case.to(device, held)
        # Errors of reconstructions are formed in float32, whatever these are.
        plain = here.to(torch.float32) if case.op == "layerwise_reconstruction_loss" else here
        found = [run(formula, exact), run(formula, plain, autocast), run(call, here, autocast)]
        if products is not None:
            found += [run(formula, rounded(exact, 4 * products, seed)) for seed in range(2)]
        kink = "nonlinearity" in case.options and (
            case.options["nonlinearity"] == "relu" or case.options["threshold"] > 0
        )
        if not kink or all(torch.equal(found[0][0] == 0, other[0] == 0) for other in found[1:]):
            runs.append(tuple(found))
        if len(runs) == draws:
            break
    for index, name in enumerate(names):
        exact, plain, given, *moved = (
            torch.stack(each) for each in zip(*([o[index] for o in r] for r in runs), strict=True)
        )
        plain = plain.to(torch.promote_types(given.dtype, dtype))
        assert_as_precise(name, given, plain, exact, epsilon, [each - exact for each in moved])


def assert_as_precise(
    name: str, given: Tensor, plain: Tensor, exact: Tensor, epsilon: float, others: Sequence[Tensor] = ()
) -> None:
    """The error of `given` against float64 is at most 1.5 times that of `plain`, plus `epsilon` of the size, plus the
    largest of `others`, errors that are allowed beside it; of both the root mean square and the maximum."""
    assert given.shape == plain.shape == exact.shape, f"{name}: {tuple(given.shape)} for {tuple(exact.shape)}"
    if not exact.numel():
        return
    assert torch.isfinite(given).all(), f"{name} is not finite"
    for measure in (lambda t: t.square().mean().sqrt().item(), lambda t: t.abs().max().item()):
        mine, torchs = (measure(tensor.double() - exact) for tensor in (given, plain))
        rounding = epsilon * measure(exact) + max(map(measure, others), default=0.0)
        told = f"{name}: error {mine:.3g}, torch's {torchs:.3g}, a rounding {rounding:.3g} of {measure(exact):.3g}"
        assert mine <= 1.5 * torchs + rounding, told


class Noted(TorchDispatchMode):
    """Notes the calls of operators of this package that the dispatcher sees."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "cdt_fast":
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


# Checks that hold on every backend, of a variant in some dtype on some device


def assert_padding_reaches_nothing(
    name: str, poison: float, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> None:
    case = variant(name, leading=(4,), tokens=5)
    lengths = torch.tensor([1, 2, 5, 9] if case.op in LOSSES else [-2, 2, 5, 9])
    padding, found = torch.arange(5) >= lengths.unsqueeze(-1), []
    case.options["lengths"] = lengths
    for filling in (0.0, poison):
        for tensor in (*case.tensors.values(), *case.options.values()):
            if isinstance(tensor, Tensor) and tensor.dim() == 3:
                tensor[padding] = filling
        found.append([result.cpu() for result in results(case.to(device, dtype))])
    assert_equal(*found)
    for result in found[1]:
        assert torch.isfinite(result).all()
        if result.shape[:-1] == padding.shape:
            assert not result[padding].any()
            assert result[~padding].any()


def assert_a_nan_shows_in_its_sample(
    name: str, dtype: torch.dtype, device: torch.device | str = "cpu", *, alone: bool = True
) -> None:
    """`alone`: and in no other one; samples that share a tile of a kernel share a NaN."""
    case = variant(name, leading=(3,))
    expected = results(case.to(device, dtype))
    for poisoned, tensor in case.tensors.items():
        if tensor.dim() != 3:
            continue
        changed = tensor.clone()
        changed[1, 0] = float("nan")
        found = results(replace(case, tensors={**case.tensors, poisoned: changed}).to(device, dtype))
        for one, other in zip(found, expected, strict=True):
            if alone and one.dim() == 3:
                assert_equal([one[[0, 2]]], [other[[0, 2]]])
        outputs = [output[1] for output in found[: len(found) - len(case.tensors)] if output.dim() == 3]
        lengths = case.options.get("lengths")
        assert any(o.isnan().any() for o in outputs) or (lengths is not None and not lengths[1]), "it must not vanish"


def assert_repeats(name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    """Bit for bit, a second backward too; neither the arguments nor the upstream gradients are written to."""
    case = variant(name, tokens=20, width=30, atoms=50).to(device, dtype)
    named = leaves_of(case)
    outputs, leaves = call(case, named), list(named.values())
    first = differentiate(outputs, leaves, retain_graph=True)
    used = [output for output in outputs if output.requires_grad]
    upstream = [torch.full_like(output, 0.5) for output in used]
    torch.autograd.grad(used, leaves, upstream, allow_unused=True, retain_graph=True)
    assert all((given == 0.5).all() for given in upstream)
    assert_equal(leaves, list(case.tensors.values()))
    assert_equal(differentiate(outputs, leaves), first)
    for _ in range(2):
        assert_equal(results(case), [*outputs, *first])


def assert_frozen_tensors_change_nothing(
    name: str, dtype: torch.dtype, device: torch.device | str = "cpu", tolerance: float = 1e-12
) -> None:
    case = variant(name).to(device, dtype)
    full = results(case)
    count = len(case.tensors)
    one = [tuple(number == place for number in range(count)) for place in range(count)]
    for trained in [(False,) * count, *one, *(tuple(not wanted for wanted in each) for each in one)]:
        given = zip(case.tensors.items(), trained, strict=True)
        leaves = {name: tensor.clone().requires_grad_(wanted) for (name, tensor), wanted in given}
        outputs = call(case, leaves)
        assert_close(outputs, full[: len(outputs)], tolerance)
        assert any(output.requires_grad for output in outputs) == any(trained)
        right = [gradient for gradient, wanted in zip(full[len(outputs) :], trained, strict=True) if wanted]
        assert_close(differentiate(outputs, [leaf for leaf in leaves.values() if leaf.requires_grad]), right, tolerance)
