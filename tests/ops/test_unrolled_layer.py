"""The unrolled layer against its formula written out: results, gradients, precision, padding, strides and errors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cdt_fast import ops
from cdt_fast.errors import InputError
from cdt_fast.kernels.arguments import UnrolledLayerArguments, UnrolledLayerBackwardArguments
from cdt_fast.models.dictionary import overcomplete_dct, squared_spectral_norm
from cdt_fast.ops.symmetric_attention import plain as attention_in_torch
from cdt_fast.ops.unrolled_layer import composed, unrolled_layer_reference
from cdt_fast.ops.unrolled_layer.operator import unrolled_layer_backward, unrolled_layer_forward
from tests.ops.ops_cases import (
    LAYOUTS,
    LOW_DTYPES,
    assert_as_precise_as_torch,
    assert_close,
    assert_compiles,
    assert_equal,
    assert_repeats,
    generator,
    gradients,
    laid_out,
    leaf,
    normal,
    opcheck,
    picture_patches,
    upstream_of,
    written_attention,
    written_layer,
)

OPTIONS: dict[str, Any] = {"step": 0.3, "threshold": 0.1}


def layer_inputs(
    seed: int,
    leading: tuple[int, ...],
    tokens: int,
    width: int,
    atoms: int,
    *,
    projection: bool = False,
    next_width: int | None = None,
) -> dict[str, Any]:
    source = generator(seed)
    inputs: dict[str, Any] = {
        "codes": normal(source, *leading, tokens, atoms),
        "signal": normal(source, *leading, tokens, width),
        "dictionary": normal(source, width, atoms) / max(1, width) ** 0.5,
    }
    if projection:
        inputs["projection"] = normal(source, *leading, tokens, width)
    if next_width is not None:
        inputs["next_dictionary"] = normal(source, next_width, atoms)
    return inputs


@st.composite
def layer_cases(draw: st.DrawFn) -> dict[str, Any]:
    sizes = st.integers(1, 5)
    leading = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    tokens = draw(sizes)
    lengths = None
    if draw(st.booleans()):
        count = torch.Size(leading).numel()
        drawn = draw(st.lists(st.integers(0, tokens), min_size=count, max_size=count))
        dtype = draw(st.sampled_from([torch.int64, torch.int32, torch.uint8]))
        lengths = torch.tensor(drawn, dtype=dtype).reshape(leading)
    following = draw(st.sampled_from(["none", "same", "other"]))
    inputs = layer_inputs(
        draw(st.integers(0, 10_000)),
        leading,
        tokens,
        draw(sizes),
        draw(sizes),
        projection=draw(st.booleans()),
        next_width=draw(sizes) if following == "other" else None,
    )
    if draw(st.integers(0, 3)) == 0:
        del inputs["codes"]
    return {
        "inputs": inputs,
        "layouts": {name: draw(st.sampled_from(LAYOUTS)) for name in inputs},
        "same": following == "same",
        "options": {
            "step": draw(st.sampled_from([0.05, 0.5, 1.0])),
            "threshold": draw(st.sampled_from([0.0, 0.1, 0.6])),
            "scale": draw(st.sampled_from([1.0, 0.25, -0.5])),
            "nonlinearity": draw(st.sampled_from(["soft_threshold", "hard_threshold", "relu"])),
            "lengths": lengths,
        },
        "used": draw(st.sampled_from(["both", "codes", "projection"])),
        "upstream_layout": draw(st.sampled_from([*LAYOUTS, "stride 0"])),
    }


def upstream_gradients(outputs: Sequence[Tensor], layout: str, used: str) -> list[Tensor | None]:
    given: list[Tensor | None] = []
    for seed, (name, output) in enumerate(zip(("codes", "projection"), outputs, strict=True)):
        given.append(upstream_of(output, layout, seed) if used in ("both", name) else None)
    return given


@settings(max_examples=300, deadline=None)
@given(layer_cases())
def test_equals_the_written_out_layer_with_every_gradient(case: dict[str, Any]) -> None:
    results = []
    for function in (ops.unrolled_layer, written_layer, unrolled_layer_reference):
        leaves = {name: leaf(tensor, case["layouts"][name]) for name, tensor in case["inputs"].items()}
        if function is unrolled_layer_reference and "projection" in leaves:
            continue
        others: dict[str, Any] = {"next_dictionary": leaves["dictionary"]} if case["same"] else {}
        if "codes" not in leaves:
            step, written = case["options"]["step"], function is written_layer
            others["codes"] = step * leaves["signal"] @ leaves["dictionary"] if written else None
        outputs = function(**leaves, **others, **case["options"])
        upstream = upstream_gradients(outputs, case["upstream_layout"], case["used"])
        results.append([*outputs, *gradients(outputs, list(leaves.values()), upstream)])
    for expected in results[1:]:
        assert_close(results[0], expected)


@pytest.mark.parametrize("projection", [False, True])
@pytest.mark.parametrize("following", ["none", "same", "other"])
@pytest.mark.parametrize("used", ["both", "codes", "projection"])
def test_frozen_inputs_get_no_gradient_and_change_no_other(projection: bool, following: str, used: str) -> None:
    inputs = layer_inputs(3, (2,), 3, 4, 5, projection=projection, next_width=4 if following == "other" else None)

    def run(trained: tuple[str, ...]) -> dict[str, Tensor | None]:
        leaves = {name: tensor.clone().requires_grad_(name in trained) for name, tensor in inputs.items()}
        extra = {"next_dictionary": leaves["dictionary"]} if following == "same" else {}
        outputs = ops.unrolled_layer(**leaves, **extra, **OPTIONS)
        assert all(output.requires_grad == bool(trained) for output in outputs)
        if trained:
            pairs = zip(outputs, upstream_gradients(outputs, "contiguous", used), strict=True)
            kept = [(output, given) for output, given in pairs if given is not None]
            torch.autograd.backward([output for output, _ in kept], [given for _, given in kept])
        return {name: tensor.grad for name, tensor in leaves.items()}

    full = run(tuple(inputs))
    for count in range(len(inputs)):
        for trained in itertools.combinations(inputs, count):
            found = run(trained)
            assert all(found[name] is None for name in inputs if name not in trained)
            assert_close([found[name] for name in trained], [full[name] for name in trained])


def test_gradient_of_a_given_projection_flows_to_the_tensor_given_and_not_twice() -> None:
    inputs = layer_inputs(4, (2,), 4, 3, 6)
    alone, handed = ({name: leaf(tensor) for name, tensor in inputs.items()} for _ in range(2))
    expected = ops.unrolled_layer(**alone, **OPTIONS)
    given = ops.unrolled_layer(**handed, projection=handed["codes"] @ handed["dictionary"].T, **OPTIONS)
    upstream = upstream_gradients(expected, "contiguous", "both")
    assert_close(
        [*given, *gradients(given, list(handed.values()), upstream)],
        [*expected, *gradients(expected, list(alone.values()), upstream)],
    )


def test_expanded_inputs_with_stride_zero() -> None:
    inputs = layer_inputs(5, (), 4, 3, 6, projection=True)
    shared, copied = ({name: leaf(tensor) for name, tensor in inputs.items()} for _ in range(2))

    def run(leaves: dict[str, Tensor], copies: bool) -> list[Tensor | None]:
        tokens = {
            name: tensor.repeat(3, 1, 1) if copies else tensor.expand(3, -1, -1)
            for name, tensor in leaves.items()
            if name != "dictionary"
        }
        outputs = ops.unrolled_layer(**tokens, dictionary=leaves["dictionary"], **OPTIONS)
        return [*outputs, *gradients(outputs, list(leaves.values()), upstream_gradients(outputs, "stride 0", "both"))]

    assert_close(run(shared, copies=False), run(copied, copies=True))


@pytest.mark.parametrize("layout", ["permuted", "expanded over the atoms"])
def test_upstream_gradients_whose_rows_cannot_be_viewed_as_one_dimension(layout: str) -> None:
    # `loss(next_codes.mT)` sends such a gradient back; `view(-1, m)` of it fails.
    inputs: dict[str, Any] = {name: leaf(tensor) for name, tensor in layer_inputs(6, (2,), 3, 4, 5).items()}
    outputs = ops.unrolled_layer(**inputs, **OPTIONS)
    if layout == "permuted":
        upstream = [normal(1, *output.shape[:-2], output.shape[-1], output.shape[-2]).mT for output in outputs]
    else:
        upstream = [normal(1, *output.shape[:-2], 1, output.shape[-2]).mT.expand(output.shape) for output in outputs]
    outputs = ops.unrolled_layer(**inputs, **OPTIONS)
    expected = gradients(
        written_layer(**inputs, **OPTIONS), list(inputs.values()), [given.contiguous() for given in upstream]
    )
    assert_close(gradients(outputs, list(inputs.values()), upstream), expected)


@pytest.mark.parametrize("nonlinearity", ["soft_threshold", "hard_threshold", "relu"])
@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("projection", [False, True])
def test_gradcheck(nonlinearity: str, with_lengths: bool, projection: bool) -> None:
    inputs = layer_inputs(8, (2,), 3, 3, 4, projection=projection, next_width=2)
    lengths = torch.tensor([2, 3]) if with_lengths else None
    options: dict[str, Any] = {**OPTIONS, "nonlinearity": nonlinearity, "lengths": lengths}

    # Away from the kinks: gradcheck's steps of 1e-6 must not cross one.
    tokens = (torch.arange(3) < lengths.unsqueeze(-1)) if lengths is not None else torch.ones(2, 3, dtype=torch.bool)
    attention = written_attention(inputs.get("projection", inputs["codes"] @ inputs["dictionary"].T), 1.0, lengths)
    mixed = attention @ inputs.get("projection", inputs["codes"] @ inputs["dictionary"].T)
    update = attention @ inputs["codes"] + 0.3 * (inputs["signal"] - mixed) @ inputs["dictionary"]
    kink = 0.0 if nonlinearity == "relu" else OPTIONS["threshold"]
    assert (update.abs() - kink).abs()[tokens].min() > 1e-4

    names, tensors = list(inputs), [leaf(tensor) for tensor in inputs.values()]
    assert torch.autograd.gradcheck(
        lambda *given: ops.unrolled_layer(**dict(zip(names, given, strict=True)), **options), tensors
    )


# Precision


def realistic_cases(seeds: range, *, projection: bool) -> tuple[list[dict[str, Any]], float]:
    dictionary = overcomplete_dct(64, 128)
    step = 1 / squared_spectral_norm(dictionary).item()
    cases = []
    for seed in seeds:
        clean = picture_patches(seed, 4, 20, 64)
        noisy = clean + 0.15 * clean.std() * normal(seed, *clean.shape)
        atoms = dictionary + 0.01 * normal(seed + 100, *dictionary.shape)
        codes = ops.soft_threshold(step * noisy @ atoms, 0.02 * step)
        case = {"codes": codes, "signal": noisy, "dictionary": atoms}
        if projection:
            case["projection"] = codes @ atoms.T
        cases.append(case)
    return cases, step


# With a threshold the errors of the gradients are those of the few codes that rounding moves across the kink, for torch
# as for us: sixteen seeds, or chance decides. At threshold 0 there is no kink, and the criterion is a sharp one.
REGIMES = [("soft_threshold", 0.2, 16), ("relu", 0.0, 16), ("soft_threshold", 0.0, 4)]


@pytest.mark.parametrize(("nonlinearity", "sparsity", "seeds"), REGIMES)
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_as_precise_as_plain_torch(dtype: torch.dtype, nonlinearity: str, sparsity: float, seeds: int) -> None:
    cases, step = realistic_cases(range(seeds), projection=False)
    options: dict[str, Any] = {"step": step, "threshold": sparsity * step, "nonlinearity": nonlinearity}
    # As a formula for torch to differentiate, S_0 would have no gradient at exactly zero; no code is that here.
    assert_as_precise_as_torch(
        lambda **inputs: ops.unrolled_layer(**inputs, **options),
        lambda **inputs: unrolled_layer_reference(**inputs, **options),
        cases,
        dtype,
        kinks=nonlinearity == "relu" or sparsity > 0,
    )


@pytest.mark.parametrize(("sparsity", "seeds"), [(0.2, 16), (0.0, 4)])
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_as_precise_as_plain_torch_with_a_projection_given(dtype: torch.dtype, sparsity: float, seeds: int) -> None:
    cases, step = realistic_cases(range(seeds), projection=True)
    options: dict[str, Any] = {"step": step, "threshold": sparsity * step}
    assert_as_precise_as_torch(
        lambda **inputs: ops.unrolled_layer(**inputs, **options),
        lambda **inputs: written_layer(**inputs, **options),
        cases,
        dtype,
        kinks=sparsity > 0,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("sparsity", "seeds"), [(0.2, 16), (0.0, 4)])
def test_autocast_computes_in_its_dtype_and_gives_gradients_in_that_of_the_parameters(
    dtype: torch.dtype, sparsity: float, seeds: int
) -> None:
    cases, step = realistic_cases(range(seeds), projection=False)
    options: dict[str, Any] = {"step": step, "threshold": sparsity * step}

    def eager(**inputs: Any) -> tuple[Tensor, Tensor]:
        # The eager layer leaves its codes in float32 where nothing but additions touch them.
        next_codes, projection = unrolled_layer_reference(**inputs, **options)
        return next_codes.to(projection.dtype), projection

    assert_as_precise_as_torch(
        lambda **inputs: ops.unrolled_layer(**inputs, **options), eager, cases, dtype, autocast=True, kinks=sparsity > 0
    )


def test_mixed_dtypes_are_welcome_under_autocast() -> None:
    inputs = {name: tensor.float() for name, tensor in layer_inputs(9, (2,), 4, 3, 6).items()}
    inputs["codes"] = inputs["codes"].bfloat16()
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = ops.unrolled_layer(**leaves, **OPTIONS)
    found = gradients(outputs, list(leaves.values()), [torch.ones_like(output) for output in outputs])
    assert [output.dtype for output in outputs] == [torch.bfloat16] * 2
    assert [gradient.dtype for gradient in found if gradient is not None] == [t.dtype for t in inputs.values()]


# Padding


@pytest.mark.parametrize("threshold", [0.0, 0.1])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("projection", [False, True])
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("nonlinearity", ["soft_threshold", "relu"])
def test_whatever_stands_in_the_padding_reaches_nothing(
    threshold: float, poison: float, codes: bool, projection: bool, nonlinearity: str
) -> None:
    inputs = layer_inputs(11, (4,), 5, 3, 6, projection=projection, next_width=3)
    first: dict[str, Any] = {} if codes else {"codes": None}
    inputs = {name: tensor for name, tensor in inputs.items() if name not in first}
    lengths = torch.tensor([0, 2, 5, 1])
    padding = torch.arange(5) >= lengths.unsqueeze(-1)
    options: dict[str, Any] = {**OPTIONS, "threshold": threshold, "nonlinearity": nonlinearity}

    def run(filling: float) -> list[Tensor | None]:
        leaves = {
            name: leaf(tensor.masked_fill(padding.unsqueeze(-1), filling) if tensor.dim() == 3 else tensor)
            for name, tensor in inputs.items()
        }
        outputs = ops.unrolled_layer(**leaves, **first, lengths=lengths, **options)
        found = gradients(outputs, list(leaves.values()), upstream_gradients(outputs, "contiguous", "both"))
        return [*outputs, *found]

    zeros, poisoned = run(0.0), run(poison)
    assert all(result is not None and torch.isfinite(result).all() for result in poisoned)
    assert_equal(poisoned, zeros)
    for result in poisoned:
        if result is not None and result.dim() == 3:
            assert (result[padding] == 0).all()
            assert (result[~padding] != 0).any()


def test_a_sequence_with_padding_equals_the_sequence_cut_to_its_length() -> None:
    inputs = layer_inputs(12, (2,), 6, 3, 5)
    padded = ops.unrolled_layer(**inputs, lengths=torch.tensor([6, 4]), **OPTIONS)
    cut = ops.unrolled_layer(inputs["codes"][1, :4], inputs["signal"][1, :4], inputs["dictionary"], **OPTIONS)
    assert_close([output[1, :4] for output in padded], cut)


@pytest.mark.parametrize("poisoned_name", ["codes", "signal", "projection"])
def test_a_nan_token_stays_in_its_sequence(poisoned_name: str) -> None:
    inputs = layer_inputs(13, (3,), 4, 3, 5, projection=True)
    leaves = {name: leaf(tensor) for name, tensor in inputs.items()}
    with torch.no_grad():
        leaves[poisoned_name][1, 2] = float("nan")
    outputs = ops.unrolled_layer(**leaves, **OPTIONS)
    tokens = [tensor for name, tensor in leaves.items() if name != "dictionary"]
    found = gradients(outputs, tokens, upstream_gradients(outputs, "contiguous", "both"))
    clean = {name: leaf(tensor) for name, tensor in inputs.items()}
    expected_outputs = ops.unrolled_layer(**clean, **OPTIONS)
    clean_tokens = [tensor for name, tensor in clean.items() if name != "dictionary"]
    expected = gradients(expected_outputs, clean_tokens, upstream_gradients(outputs, "contiguous", "both"))
    assert torch.isnan(outputs[0][1]).any(), "a NaN must not vanish either"
    assert torch.isnan(outputs[1][1]).any()
    for result, right in zip((*outputs, *found), (*expected_outputs, *expected), strict=True):
        assert result is not None
        assert right is not None
        assert_equal([result[[0, 2]]], [right[[0, 2]]])


# Autograd's contract, repeats, empty inputs


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float64, *LOW_DTYPES], ids=str)
@pytest.mark.parametrize("projection", [False, True])
def test_repeats_are_bitwise_equal_and_a_second_backward_too(
    projection: bool, dtype: torch.dtype, used: tuple[bool, bool]
) -> None:
    cases, step = realistic_cases(range(1), projection=projection)
    leaves = [leaf(tensor.to(dtype)) for tensor in cases[0].values()]

    def layer(codes: Tensor, signal: Tensor, dictionary: Tensor, projection: Tensor | None = None) -> Sequence[Tensor]:
        options: dict[str, Any] = {"step": step, "threshold": 0.2 * step, "projection": projection}
        return ops.unrolled_layer(codes, signal, dictionary, **options)

    assert_repeats(layer, leaves, used)


@pytest.mark.parametrize(
    ("leading", "tokens"), [((0,), 2), ((3,), 0), ((), 0), ((0,), 0), ((2, 0), 2), ((0, 2), 3), ((2, 2), 0)]
)
@pytest.mark.parametrize("with_lengths", [False, True])
def test_empty_batches_and_empty_sequences(leading: tuple[int, ...], tokens: int, with_lengths: bool) -> None:
    inputs: dict[str, Any] = {
        name: leaf(tensor) for name, tensor in layer_inputs(16, leading, tokens, 3, 5, projection=True).items()
    }
    lengths = torch.zeros(leading, dtype=torch.int64) if with_lengths else None
    outputs = ops.unrolled_layer(**inputs, lengths=lengths, **OPTIONS)
    assert [output.shape for output in outputs] == [(*leading, tokens, 5), (*leading, tokens, 3)]
    torch.cat([output.flatten() for output in outputs]).sum().backward()
    assert inputs["codes"].grad is not None
    assert inputs["codes"].grad.shape == inputs["codes"].shape
    assert inputs["dictionary"].grad is not None
    assert (inputs["dictionary"].grad == 0).all()


@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("atoms", [0, 5])
def test_empty_widths(width: int, atoms: int) -> None:
    inputs: dict[str, Any] = {name: leaf(tensor) for name, tensor in layer_inputs(17, (2,), 3, width, atoms).items()}
    outputs = ops.unrolled_layer(**inputs, **OPTIONS)
    assert_close(outputs, written_layer(**inputs, **OPTIONS))
    torch.cat([output.flatten() for output in outputs]).sum().backward()


# The squared error


def with_error(inputs: dict[str, Any], target: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The written-out layer, and its error a second time, one number at a time."""
    next_codes, projection = written_layer(**inputs, **options)
    mask = torch.ones(projection.shape[:-1], dtype=torch.bool)
    if options.get("lengths") is not None:
        mask = torch.arange(projection.shape[-2]) < options["lengths"].unsqueeze(-1)
    return next_codes, projection, sum(((projection - target)[mask] ** 2).flatten(), torch.tensor(0.0))


ARRIVING = [used for used in itertools.product([True, False], repeat=3) if any(used)]


@pytest.mark.parametrize("arriving", ARRIVING)
@pytest.mark.parametrize("next_width", [None, 2])
@pytest.mark.parametrize("lengths", [None, (0, 4, 2)])
@pytest.mark.parametrize("projection", [False, True])
def test_a_target_gives_the_squared_error_and_its_gradient(
    projection: bool, lengths: Any, next_width: int | None, arriving: tuple[bool, ...]
) -> None:
    inputs = layer_inputs(20, (3,), 4, 3, 6, projection=projection, next_width=next_width)
    target = normal(21, 3, 4, next_width or 3).requires_grad_()
    options = {**OPTIONS, "lengths": None if lengths is None else torch.tensor(lengths)}
    upstream = [normal(1, 3, 4, 6), normal(2, 3, 4, next_width or 3), torch.tensor(-0.7, dtype=torch.float64)]
    results = []
    for function in (lambda leaves: ops.unrolled_layer(**leaves, target=target, **options),
                     lambda leaves: with_error(leaves, target.detach(), **options)):  # fmt: skip
        leaves = {name: leaf(tensor) for name, tensor in inputs.items()}
        outputs = function(leaves)
        given = [gradient if there else None for gradient, there in zip(upstream, arriving, strict=True)]
        results.append([*outputs, *gradients(outputs, list(leaves.values()), given)])
    assert results[0][2].shape == ()
    # Codes alone do not depend on the next dictionary: the written-out layer says so with None, we with zeros or None.
    for one, other in zip(*results, strict=True):
        if other is None:
            assert one is None or (one == 0).all()
        else:
            assert_close([one], [other])
    assert target.grad is None


def test_a_target_leaves_the_other_results_bit_for_bit() -> None:
    inputs = layer_inputs(22, (3,), 4, 3, 6)
    assert_equal(ops.unrolled_layer(**inputs, **OPTIONS, target=inputs["signal"])[:2],
                 ops.unrolled_layer(**inputs, **OPTIONS))  # fmt: skip


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("target_dtype", [*LOW_DTYPES, torch.float64], ids=str)
def test_a_target_in_another_dtype(dtype: torch.dtype, target_dtype: torch.dtype) -> None:
    inputs = {name: tensor.to(dtype) for name, tensor in layer_inputs(23, (3,), 4, 3, 6).items()}
    target = normal(24, 3, 4, 3).bfloat16().half()  # what all four hold

    def run(target: Tensor) -> list[Tensor | None]:
        leaves = {name: leaf(tensor) for name, tensor in inputs.items()}
        outputs = ops.unrolled_layer(**leaves, target=target, **OPTIONS)
        assert [output.dtype for output in outputs] == [dtype, dtype, torch.float32]
        return [*outputs, *gradients(outputs, list(leaves.values()), [torch.ones_like(output) for output in outputs])]

    found, expected = run(target.to(target_dtype)), run(target.to(dtype))
    if target_dtype == torch.float64:  # Z⁺ − S is formed in it then, and rounded once
        assert_close(found, expected, 1e-6)
    else:
        assert_equal(found, expected)


@pytest.mark.parametrize("untied", [False, True])
def test_casts_of_the_caller_take_the_place_of_the_layer_s_own(untied: bool) -> None:
    made = layer_inputs(41, (2,), 5, 6, 8, projection=True, **({"next_width": 6} if untied else {}))
    results = []
    for cast_before in (False, True):
        inputs = {name: tensor.float().requires_grad_() for name, tensor in made.items()}
        following = inputs.get("next_dictionary")
        casts = inputs["dictionary"].detach().bfloat16(), None if following is None else following.detach().bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = ops.unrolled_layer(**inputs, step=0.3, threshold=0.1, casts=casts if cast_before else None)
        total = outputs[0].float().sum() + outputs[1].float().sum()
        gradients = torch.autograd.grad(total, list(inputs.values()))
        assert all(gradient.dtype == torch.float32 for gradient in gradients)
        results.append([*outputs, *gradients])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_the_error_under_autocast_is_summed_in_float32() -> None:
    inputs = {name: leaf(tensor.float()) for name, tensor in layer_inputs(25, (3,), 4, 3, 6).items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, projection, error = ops.unrolled_layer(**inputs, **OPTIONS, target=inputs["signal"].detach())
    assert (projection.dtype, error.dtype) == (torch.bfloat16, torch.float32)
    expected = (projection.double() - inputs["signal"].double()).square().sum()
    assert error.item() == pytest.approx(expected.item(), rel=1e-5)
    error.backward()
    assert all(tensor.grad is not None and tensor.grad.dtype == torch.float32 for tensor in inputs.values())


def test_a_loss_of_weight_zero_gives_no_gradient_where_it_is_infinite() -> None:
    inputs: dict[str, Any] = {name: leaf(tensor) for name, tensor in layer_inputs(26, (3,), 4, 3, 6).items()}
    target = normal(27, 3, 4, 3)
    target[1, 2, 0] = float("inf")
    outputs = ops.unrolled_layer(**inputs, **OPTIONS, target=target)
    assert torch.isinf(outputs[2])
    upstream = upstream_gradients(outputs[:2], "contiguous", "both")
    expected = gradients(outputs, list(inputs.values()), [*upstream, None])
    outputs = ops.unrolled_layer(**inputs, **OPTIONS, target=target)
    zero = torch.zeros((), dtype=torch.float64)
    assert_close(gradients(outputs, list(inputs.values()), [*upstream, zero]), expected)
    outputs = ops.unrolled_layer(**inputs, **OPTIONS, target=target)
    alone = gradients(outputs, list(inputs.values()), [None, None, zero])
    assert all(gradient is None or (gradient == 0).all() for gradient in alone)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_target_at_padding_counts_for_nothing(poison: float) -> None:
    inputs, lengths = layer_inputs(28, (3,), 4, 3, 6), torch.tensor([0, 4, 2])
    target, padding = normal(29, 3, 4, 3), torch.arange(4) >= lengths.unsqueeze(-1)
    results = []
    for filling in (0.0, poison):
        leaves = {name: leaf(tensor) for name, tensor in inputs.items()}
        filled = target.masked_fill(padding.unsqueeze(-1), filling)
        error = ops.unrolled_layer(**leaves, **OPTIONS, lengths=lengths, target=filled)[2]
        results.append([error, *torch.autograd.grad(error, list(leaves.values()))])
    assert all(torch.isfinite(result).all() for result in results[1])
    assert_equal(*results)


@pytest.mark.parametrize(("leading", "tokens"), [((0,), 2), ((3,), 0)])
def test_the_error_of_nothing_is_zero(leading: tuple[int, ...], tokens: int) -> None:
    inputs = {name: leaf(tensor) for name, tensor in layer_inputs(30, leading, tokens, 3, 6).items()}
    error = ops.unrolled_layer(**inputs, **OPTIONS, target=torch.zeros(*leading, tokens, 3))[2]
    assert error == 0
    error.backward()
    assert inputs["dictionary"].grad is not None
    assert (inputs["dictionary"].grad == 0).all()


# The contract of a custom op, and torch.compile


@pytest.mark.parametrize("nonlinearity", ["soft_threshold", "relu", "identity"])
@pytest.mark.parametrize(
    "given",
    [
        ("codes",),
        ("codes", "projection"),
        ("codes", "next_dictionary", "target"),
        ("codes", "projection", "next_dictionary", "target", "lengths"),
        ("projection", "next_dictionary", "target"),
    ],
)
def test_opcheck(given: tuple[str, ...], nonlinearity: Any) -> None:
    inputs = {
        name: leaf(tensor) for name, tensor in layer_inputs(31, (2,), 3, 4, 5, projection=True, next_width=2).items()
    }
    inputs["target"], inputs["lengths"] = normal(32, 2, 3, 2), torch.tensor([3, 1])
    optional = dict.fromkeys(("codes", "projection", "next_dictionary", "target", "lengths"))
    layer = UnrolledLayerArguments(
        **{**inputs, **optional, **{name: inputs[name] for name in given}},  # type: ignore[arg-type]
        step=0.3,
        threshold=0.0 if nonlinearity == "identity" else 0.1,
        scale=0.8,
        nonlinearity=nonlinearity,
        backend="torch",
    )
    opcheck(unrolled_layer_forward, layer)


def test_the_strides_of_the_gradients_are_those_that_a_compiler_is_told() -> None:
    # opcheck of the forward does not ask for them; Inductor stops where they differ.
    inputs = layer_inputs(31, (2,), 3, 4, 5, projection=True, next_width=2)
    codes, signal, projection = (inputs[name] for name in ("codes", "signal", "projection"))
    dictionaries = [laid_out(inputs[name], "transposed") for name in ("dictionary", "next_dictionary")]
    next_projection = normal(33, 2, 3, 2)
    for used in (True, False):  # without a gradient of Z⁺ that of its dictionary is zero
        layer = UnrolledLayerBackwardArguments(
            codes=codes,
            signal=signal,
            dictionary=dictionaries[0],
            projection=projection,
            next_dictionary=dictionaries[1],
            next_codes=codes,
            next_projection=None,
            grad_next_codes=codes,
            grad_next_projection=next_projection if used else None,
            step=0.3,
            threshold=0.1,
            scale=0.8,
            needs_next_dictionary=True,
            backend="torch",
        )
        opcheck(unrolled_layer_backward, layer, test_utils="test_faketensor")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_torch_compile_sees_one_graph(given: bool, dynamic: bool) -> None:
    def network(codes: Tensor, signal: Tensor, dictionary: Tensor, lengths: Tensor | None) -> Tensor:
        codes, projection = ops.unrolled_layer(2 * codes, signal, dictionary, **OPTIONS, lengths=lengths)
        options: dict[str, Any] = {}
        if given:
            options = {"projection": projection, "next_dictionary": 2 * dictionary, "target": signal}
        outputs = ops.unrolled_layer(codes, signal, dictionary, **OPTIONS, **options, lengths=lengths)
        return torch.stack([output.square().sum() for output in outputs]).sum()

    def make(batch: int, tokens: int) -> list[Any]:
        lengths = torch.arange(batch) + 1 if given else None
        return [*(leaf(tensor) for tensor in layer_inputs(33, (batch,), tokens, 3, 6).values()), lengths]

    assert_compiles(network, make, [(2, 4), (3, 5)], dynamic)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_error_without_gradients(mode: Any) -> None:
    inputs: dict[str, Any] = {name: leaf(tensor) for name, tensor in layer_inputs(34, (2,), 3, 3, 4).items()}
    target = normal(35, 2, 3, 3)
    expected = ops.unrolled_layer(**inputs, **OPTIONS, target=target)
    with mode():
        outputs = ops.unrolled_layer(**inputs, **OPTIONS, target=target)
    assert not any(output.requires_grad for output in outputs)
    assert_equal(outputs, expected)


# Errors

FLOATS = {"codes": (2, 3, 5), "signal": (2, 3, 4), "dictionary": (4, 5)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"codes": torch.zeros(5)}, r"codes must be .*\[\.\.\., T, m\], got \(5,\) float32"),
        ({"signal": torch.zeros(4)}, r"signal must be .*\[\.\.\., T, n\], got \(4,\)"),
        ({"dictionary": torch.zeros(5)}, r"dictionary must be .*\[n, m\], got \(5,\)"),
        ({"dictionary": torch.zeros(1, 4, 5)}, r"dictionary must have shape \(4, 5\).*got \(1, 4, 5\)"),
        ({"codes": [1.0]}, r"codes must be a dense floating-point tensor .* got \[1.0\] \(list\)"),
        ({"codes": torch.zeros(2, 3, 5, dtype=torch.int64)}, r"codes must be a dense floating-point .* got .*int64"),
        (
            {"signal": torch.zeros(2, 3, 4, dtype=torch.complex64)},
            r"signal must be a dense floating-point .* got .*complex64",
        ),
        ({"signal": torch.zeros(2, 2, 4)}, r"signal must have shape \(2, 3, 4\).*got \(2, 2, 4\)"),
        ({"signal": torch.zeros(3, 3, 4)}, r"signal must have shape \(2, 3, 4\).*got \(3, 3, 4\)"),
        ({"dictionary": torch.zeros(5, 4)}, r"dictionary must have shape \(4, 5\).*got \(5, 4\)"),
        ({"signal": torch.zeros(2, 3, 4).double()}, r"signal is torch.float64 but codes is torch.float32"),
        ({"dictionary": torch.zeros(4, 5).bfloat16()}, r"dictionary is torch.bfloat16 but codes is torch.float32"),
        ({"dictionary": torch.zeros(4, 5, device="meta")}, r"dictionary is on meta but codes is on cpu"),
        ({"projection": torch.zeros(2, 3, 5)}, r"projection must have shape \(2, 3, 4\).*got \(2, 3, 5\)"),
        ({"projection": torch.zeros(2, 3, 4).double()}, r"projection is torch.float64 but codes is torch.float32"),
        ({"projection": torch.zeros(2, 3, 4, device="meta")}, r"projection is on meta but codes is on cpu"),
        ({"projection": torch.zeros(2, 3, 4, dtype=torch.int32)}, r"projection must be a dense floating-point.*int32"),
        ({"projection": "Z"}, r"projection must be a dense floating-point tensor .* got 'Z' \(str\)"),
        ({"next_dictionary": torch.zeros(4, 6)}, r"next_dictionary must have shape \(4, 5\).*got \(4, 6\)"),
        ({"next_dictionary": torch.zeros(5)}, r"next_dictionary must be .*\[k, m\], got \(5,\)"),
        ({"next_dictionary": torch.tensor(1.0)}, r"next_dictionary must be .*\[k, m\], got \(\)"),
        ({"next_dictionary": torch.zeros(4, 5).half()}, r"next_dictionary is torch.float16 but codes is torch.float32"),
        ({"next_dictionary": torch.zeros(4, 5, device="meta")}, r"next_dictionary is on meta but codes is on cpu"),
        ({"target": torch.zeros(2, 3, 5)}, r"target must have shape \(2, 3, 4\) .*got \(2, 3, 5\)"),
        ({"target": torch.zeros(3, 4)}, r"target must have shape \(2, 3, 4\) .*got \(3, 4\)"),
        ({"target": torch.zeros(2, 3, 4, dtype=torch.uint8)}, r"target must be a dense floating-point tensor .*uint8"),
        ({"target": "S"}, r"target must be a dense floating-point tensor .* got 'S' \(str\)"),
        ({"target": torch.zeros(2, 3, 4, device="meta")}, r"target is on meta but signal is on cpu"),
        (
            {"target": torch.zeros(2, 3, 4), "next_dictionary": torch.zeros(6, 5)},
            r"target must have shape \(2, 3, 6\) .*width of the next projection.*got \(2, 3, 4\)",
        ),
        ({"lengths": torch.tensor([1, 2, 3])}, r"lengths must have shape \(2,\) \(one length a sequence\), got \(3,\)"),
        ({"lengths": torch.tensor([[1, 2]])}, r"lengths must have shape \(2,\).*got \(1, 2\)"),
        ({"lengths": torch.tensor([1.0, 2.0])}, r"lengths must be an integer tensor .* got \(2,\) float32"),
        ({"lengths": torch.tensor([True, False])}, r"lengths must be an integer tensor .* got \(2,\) bool"),
        ({"lengths": [1, 2]}, r"lengths must be an integer tensor .* got \[1, 2\] \(list\)"),
        ({"lengths": torch.tensor([1, 2], device="meta")}, r"lengths is on meta but the tokens are on cpu"),
        ({"step": -0.1}, r"step must be a finite number >= 0, got -0.1"),
        ({"step": float("nan")}, r"step must be a finite number >= 0, got nan"),
        ({"step": float("inf")}, r"step must be a finite number >= 0, got inf"),
        ({"step": "0.1"}, r"step must be a finite number >= 0, got '0.1' \(str\)"),
        ({"step": True}, r"step must be a finite number >= 0, got True \(bool\)"),
        ({"step": torch.tensor([0.1, 0.2])}, r"step must be a number, got a tensor: \(2,\) float32"),
        ({"step": torch.tensor(0.1, requires_grad=True)}, r"step must be a number, got a tensor"),
        ({"threshold": -1}, r"threshold must be a finite number >= 0, got -1"),
        ({"threshold": float("nan")}, r"threshold must be a finite number >= 0, got nan"),
        ({"scale": float("inf")}, r"scale must be a finite number, got inf"),
        (
            {"nonlinearity": "gelu"},
            r"nonlinearity must be one of 'soft_threshold', 'hard_threshold', 'relu', got 'gelu'",
        ),
    ],
)
def test_errors_name_the_argument_what_was_given_and_what_is_expected(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {name: torch.zeros(shape) for name, shape in FLOATS.items()}
    with pytest.raises(InputError, match=message):
        ops.unrolled_layer(**{**arguments, **OPTIONS, **changed})


def test_numbers_may_be_tensors_of_one_element() -> None:
    inputs = layer_inputs(18, (2,), 3, 4, 5)
    expected = ops.unrolled_layer(**inputs, step=0.25, threshold=0.5)
    given = ops.unrolled_layer(**inputs, step=torch.tensor(0.25), threshold=torch.tensor([0.5]))  # type: ignore[arg-type]
    assert_equal(given, expected)


@pytest.mark.parametrize("case", ["codes", "no codes", "codes with their projection, no target"])
def test_a_layer_whose_scores_are_too_many_to_hold_is_composed_of_ops(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for panel_bytes in (2**26, 1):
        monkeypatch.setattr(composed, "HELD_SCORE_BYTES", panel_bytes)
        monkeypatch.setattr(attention_in_torch, "PANEL_BYTES", panel_bytes)
        inputs = {name: leaf(tensor) for name, tensor in layer_inputs(60, (3,), 5, 4, 6, next_width=3).items()}
        options: dict[str, Any] = {**OPTIONS, "lengths": torch.tensor([5, 0, 3]), "target": normal(61, 3, 5, 3)}
        if case == "no codes":
            del inputs["codes"]
            options["codes"] = None
        if case.endswith("no target"):
            inputs["projection"] = leaf(normal(64, 3, 5, 4))
            del options["target"]
        outputs = [output for output in ops.unrolled_layer(**inputs, **options) if output is not None]
        upstream = [normal(62 + index, *output.shape) for index, output in enumerate(outputs)]
        results.append([*outputs, *gradients(outputs, list(inputs.values()), upstream)])
    assert_close(results[1], results[0])
