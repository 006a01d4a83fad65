"""What the tests of the ops share: inputs, formulas written a second time, layouts in memory, and the criteria."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cdt_fast.ops.shared.registration import Operator

LAYOUTS = ("contiguous", "transposed", "inside a poisoned buffer")
LOW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int | torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    source = seed if isinstance(seed, torch.Generator) else generator(seed)
    return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values with other strides; around the poisoned ones lies NaN, so that a read outside shows."""
    if layout == "transposed":
        return tensor.mT.contiguous().mT
    if layout == "inside a poisoned buffer":
        *leading, rows, columns = tensor.shape
        buffer = tensor.new_full((*leading, rows + 2, 2 * columns + 1), float("nan"))
        inside = buffer[..., 1:-1, 1::2]
        inside.copy_(tensor)
        return inside
    return tensor.contiguous()


def leaf(tensor: Tensor, layout: str = "contiguous") -> Tensor:
    return laid_out(tensor.detach(), layout).requires_grad_()


# The formulas, written without softmax, softshrink or masks that the ops or their references use


def written_attention(z: Tensor, scale: float, lengths: Tensor | None = None, energy: bool = False) -> Tensor:
    """`[..., T, T]`, a sequence at a time, from exponentials alone; zero rows and columns at padding."""
    tokens, width = z.shape[-2:]
    sequences = z.reshape(z.shape[:-2].numel(), tokens, width)
    counts = [tokens] * len(sequences) if lengths is None else lengths.reshape(-1).tolist()
    matrices = []
    for sequence, count in zip(sequences, counts, strict=True):
        matrix = 0.0 * (sequence @ sequence.T)
        if count:
            kept = sequence[:count]
            scores = scale * (kept @ kept.T)
            if energy:
                scores = scores - scale * 0.5 * (kept * kept).sum(1)
            weights = torch.exp(scores - scores.max(1, keepdim=True).values.detach())
            weights = weights / weights.sum(1, keepdim=True)
            matrix = torch.nn.functional.pad(weights, (0, tokens - count, 0, tokens - count))
        matrices.append(matrix)
    return torch.stack(matrices).reshape(*z.shape[:-1], tokens)


def written_shrinkage(x: Tensor, threshold: float, nonlinearity: str) -> Tensor:
    if nonlinearity == "hard_threshold":
        return torch.where(x.abs() > threshold, x, torch.zeros_like(x)) if threshold else x
    if nonlinearity == "relu":
        return torch.where(x > 0, x, torch.zeros_like(x))
    zero = torch.zeros_like(x) if threshold else x
    return torch.where(x > threshold, x - threshold, torch.where(x < -threshold, x + threshold, zero))


def written_layer(
    codes: Tensor,
    signal: Tensor,
    dictionary: Tensor,
    *,
    step: float,
    threshold: float,
    scale: float = 1.0,
    nonlinearity: str = "soft_threshold",
    projection: Tensor | None = None,
    lengths: Tensor | None = None,
    next_dictionary: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The layer by the docstring, with the projection as a variable of its own where it is given."""
    mask = torch.ones(codes.shape[:-1], dtype=torch.bool)
    if lengths is not None:
        mask = torch.arange(codes.shape[-2]) < lengths.unsqueeze(-1)
    codes, signal = (torch.where(mask.unsqueeze(-1), tokens, 0.0) for tokens in (codes, signal))
    if projection is None:
        attention = written_attention(codes @ dictionary.T, scale, lengths)
        mixed_projection = (attention @ codes) @ dictionary.T
    else:
        projection = torch.where(mask.unsqueeze(-1), projection, 0.0)
        attention = written_attention(projection, scale, lengths)
        mixed_projection = attention @ projection
    update = attention @ codes + step * ((signal - mixed_projection) @ dictionary)
    update = torch.where(mask.unsqueeze(-1), update, 0.0)
    next_codes = written_shrinkage(update, threshold, nonlinearity)
    return next_codes, next_codes @ (dictionary if next_dictionary is None else next_dictionary).T


def opcheck(operator: Operator[Any, Any], arguments: Any, **options: Any) -> None:
    """torch's own checks of an operator, called with its record."""
    torch.library.opcheck(operator.overload, operator.flat(arguments), **options)


# The criteria


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], upstream: Sequence[Tensor | None], retain: bool = False
) -> list[Tensor | None]:
    """Gradients of `inputs` from the outputs whose upstream gradient is not None; None where nothing arrives."""
    used, given = zip(*[pair for pair in zip(outputs, upstream, strict=True) if pair[1] is not None], strict=True)
    return list(torch.autograd.grad(used, inputs, given, retain_graph=retain, allow_unused=True))


def upstream_of(output: Tensor, layout: str = "contiguous", seed: int = 1) -> Tensor:
    """A gradient in one of the `LAYOUTS`, or with "stride 0", as that of a sum is."""
    if layout == "stride 0":
        return torch.tensor(0.7 + seed, dtype=output.dtype).expand(output.shape)
    return laid_out(normal(seed, *output.shape, dtype=output.dtype), layout)


def assert_close(given: Iterable[Tensor | None], expected: Iterable[Tensor | None], tolerance: float = 1e-12) -> None:
    """Equal up to `tolerance` of the largest value (at least 1), in the same places finite and None."""
    for index, (one, other) in enumerate(zip(given, expected, strict=True)):
        assert (one is None) == (other is None), f"number {index}: {one} against {other}"
        if one is None or other is None:
            continue
        assert one.shape == other.shape, f"number {index}: {one.shape} against {other.shape}"
        assert torch.isfinite(one).all(), f"number {index} is not finite"
        if one.numel():
            error = (one - other).abs().max().item()
            assert error <= tolerance * max(1.0, other.abs().max().item()), f"number {index} is off by {error}"


def assert_equal(given: Iterable[Tensor | None], expected: Iterable[Tensor | None]) -> None:
    """Bit for bit the same; NaN equals NaN."""
    for index, (one, other) in enumerate(zip(given, expected, strict=True)):
        assert (one is None) == (other is None), f"number {index}"
        if one is not None and other is not None:
            assert one.dtype == other.dtype
            assert torch.equal(one.nan_to_num(1e30), other.nan_to_num(1e30)), f"number {index}"


def assert_is_its_formulas(case: dict[str, Any], *functions: Callable[..., Tensor]) -> None:
    """The first function gives the results and every gradient of the others, for drawn inputs, layouts and options."""
    results = []
    for function in functions:
        leaves = {name: leaf(tensor, case["layouts"][name]) for name, tensor in case["inputs"].items()}
        output = function(**leaves, **case["options"])
        upstream = upstream_of(output, case["upstream_layout"])
        results.append([output, *gradients([output], list(leaves.values()), [upstream])])
    for expected in results[1:]:
        assert_close(results[0], expected)


def assert_repeats(
    function: Callable[..., Sequence[Tensor]], leaves: Sequence[Tensor], used: Sequence[bool] = (True,)
) -> None:
    """Bit for bit, of a second backward too; the gradients of the outputs that are `used` are not written to."""
    outputs = function(*leaves)
    upstream = [upstream_of(output) if one else None for output, one in zip(outputs, used, strict=True)]
    kept = [None if given is None else given.clone() for given in upstream]
    first = gradients(outputs, leaves, upstream, retain=True)
    assert_equal(gradients(outputs, leaves, upstream), first)
    for _ in range(3):
        again = function(*leaves)
        assert_equal([*again, *gradients(again, leaves, upstream)], [*outputs, *first])
    assert_equal(upstream, kept)


def assert_compiles(
    network: Callable[..., Tensor], make: Callable[..., Sequence[Any]], sizes: Iterable[tuple[Any, ...]], dynamic: bool
) -> None:
    """In one graph, with the results and the gradients of the network itself, for what is made of each of the sizes."""
    torch._dynamo.reset()
    compiled = torch.compile(network, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for size in sizes:
        results = []
        for function in (network, compiled):
            given = make(*size)
            leaves = [each for each in tree_leaves(given) if isinstance(each, Tensor) and each.requires_grad]
            output = function(*given)
            found = gradients([output.square().sum()], leaves, [torch.ones((), dtype=output.dtype)])
            pairs = zip(leaves, found, strict=True)
            results.append([output, *(torch.zeros_like(each) if grad is None else grad for each, grad in pairs)])
        assert_close(*results)


def assert_a_nan_stays_in_its_row(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], poisoned: int, of_rows: Sequence[int]
) -> None:
    """A NaN in row 2 of the input of that number changes no other row, of the result or of the gradients `of_rows`."""
    results = []
    for filling in (float("nan"), None):
        leaves = [tensor.detach().clone() for tensor in inputs]
        if filling is not None:
            leaves[poisoned][2, 1] = filling
        leaves = [leaf(tensor) for tensor in leaves]
        output = function(*leaves)
        results.append([output, *torch.autograd.grad(output.sum(), [leaves[number] for number in of_rows])])
    others = [row for row in range(len(inputs[poisoned])) if row != 2]
    assert_equal(*([result[others] for result in some] for some in results))
    assert torch.isnan(results[0][0][2]).any()


def saved_shapes(function: Callable[..., Any], *given: Tensor) -> list[tuple[int, ...]]:
    """Of what a call keeps for its backward."""
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*given)
    return sorted(shapes)


def picture_patches(seed: int, batch: int, tokens: int, width: int) -> Tensor:
    """`[batch, tokens, width]` in [0, 1]: smooth patches of one place that change slowly over time, with grain."""
    source = generator(seed)
    side = round(width**0.5)
    frames = torch.rand(batch, tokens, 3, 3, generator=source, dtype=torch.float64)
    frames = frames[:, :1] + 0.2 * (frames - frames[:, :1])
    smooth = torch.nn.functional.interpolate(frames, size=(side, side), mode="bilinear", align_corners=True)
    grain = 0.05 * torch.randn(batch, tokens, width, generator=source, dtype=torch.float64)
    return (smooth.reshape(batch, tokens, width) + grain).clamp(0, 1)


def assert_as_precise_as_torch(
    operation: Callable[..., Sequence[Tensor]],
    reference: Callable[..., Sequence[Tensor]],
    cases: Sequence[dict[str, Any]],
    dtype: torch.dtype,
    *,
    autocast: bool = False,
    kinks: bool = False,
) -> None:
    """Errors against float64 at most 1.5 times those of the same formula in plain torch at `dtype`, plus a floor.

    Every case is a dict of named tensors, in float64 with values that `dtype` (under autocast: float32) can hold, so
    that the float64 result is exact for the inputs that all three get. Forward and backward, every output and every
    gradient on its own; the root mean square and the maximum are pooled over the cases, as one single case can be
    lucky. With `kinks` the gradients' maxima are left out: it is chance which codes rounding moves across a kink.

    The floor is eps times the size (rms, max) of the result: to round a result once, or one factor of each product
    that it sums, costs at most that, and no implementation can be expected to be better than the rounding.
    """
    inputs_dtype = torch.float32 if autocast else dtype

    def run(function: Callable[..., Sequence[Tensor]], case: dict[str, Any], run_dtype: torch.dtype) -> list[Tensor]:
        leaves = {name: leaf(tensor.to(run_dtype)) for name, tensor in case.items()}
        with torch.autocast("cpu", dtype=dtype, enabled=autocast and run_dtype != torch.float64):
            outputs = list(function(**leaves))
        # Upstream gradients that every dtype holds exactly, and that are not all the same.
        upstream = [
            (torch.randint(-8, 9, output.shape, generator=generator(7)) / 8).to(output.dtype) for output in outputs
        ]
        found = gradients(outputs, list(leaves.values()), upstream)
        assert all(gradient is not None and gradient.dtype == run_dtype for gradient in found)
        assert run_dtype == torch.float64 or all(output.dtype == dtype for output in outputs)
        return [tensor.detach().double() for tensor in (*outputs, *found) if tensor is not None]

    cases = [{name: tensor.to(inputs_dtype).double() for name, tensor in case.items()} for case in cases]
    exact = [run(reference, case, torch.float64) for case in cases]
    ours = [run(operation, case, inputs_dtype) for case in cases]
    plain = [run(reference, case, inputs_dtype) for case in cases]
    names = [f"output {index}" for index in range(len(exact[0]) - len(cases[0]))] + [
        f"gradient of {n}" for n in cases[0]
    ]
    epsilon = torch.finfo(dtype).eps
    for index, name in enumerate(names):

        def pooled(results: list[list[Tensor]], place: int = index) -> tuple[float, float]:
            values = torch.stack([result[place] for result in results])
            return values.square().mean().sqrt().item(), values.abs().max().item()

        def errors(results: list[list[Tensor]], place: int = index) -> tuple[float, float]:
            wrong = [[result[place] - true[place]] for result, true in zip(results, exact, strict=True)]
            return pooled(wrong, 0)

        measures = zip(("rms", "maximum"), errors(ours), errors(plain), pooled(exact), strict=True)
        for measure, mine, torchs, size in measures:
            if measure == "maximum" and kinks and name.startswith("gradient"):
                continue
            bound = 1.5 * torchs + epsilon * size
            assert mine <= bound, f"{name}: {measure} error {mine:.3g}, torch's {torchs:.3g} of {size:.3g}"
