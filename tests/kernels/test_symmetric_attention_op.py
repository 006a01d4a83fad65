"""`ops.symmetric_attention` on its kernels: shapes, layouts, which kernel takes what, and refusals that say why."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.errors import InputError
from cdt_fast.kernels import symmetric_attention as dispatch
from cdt_fast.kernels.arguments import SymmetricAttentionArguments
from cdt_fast.kernels.blocks import LONGEST
from cdt_fast.ops.symmetric_attention import symmetric_attention_reference
from cdt_fast.ops.symmetric_attention.operator import symmetric_attention_forward
from tests.kernels.kernel_cases import Inputs, floors, normal
from tests.kernels.precision import assert_as_precise


def attend(attention: Any, tensors: Sequence[Tensor | None], upstream: Tensor, **options: Any) -> list[Tensor]:
    """The output and the gradients of `z` and, where they are given, of the values; all on the CPU."""
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]
    output = attention(*leaves, **options)
    found = torch.autograd.grad(output, [leaf for leaf in leaves if leaf is not None], upstream)
    return [output.detach().cpu(), *(gradient.cpu() for gradient in found)]


def assert_is_the_formula(z: Tensor, values: Tensor | None, upstream: Tensor, **options: Any) -> list[Tensor]:
    given = attend(ops.symmetric_attention, [z, values], upstream, **options)
    options = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()}

    def reference(dtype: torch.dtype) -> list[Tensor]:
        tensors = [None if tensor is None else tensor.cpu().to(dtype) for tensor in (z, values)]
        return attend(symmetric_attention_reference, tensors, upstream.cpu().to(dtype), **options)

    output, _, *gradients = floors(Inputs(z, values, upstream, **{"scale": 1.0, **options}))
    names = ("output", "gradient of z", "gradient of the values")
    results = zip(given, reference(z.dtype), reference(torch.float64), strict=True)
    for name, terms, result in zip(names, (output, *gradients), results, strict=False):
        assert_as_precise(name, *result, terms=terms)
    return given


def inputs(*shape: int, values: int | None, device: torch.device, dtype: torch.dtype) -> list[Tensor | None]:
    """`z`, the values and an upstream gradient."""
    widths = (shape[-1], values, shape[-1] if values is None else values)
    tensors = [
        None if width is None else normal(seed, *shape[:-1], width) / shape[-1] ** 0.25
        for seed, width in enumerate(widths)
    ]
    return [None if tensor is None else tensor.to(device, dtype) for tensor in tensors]


@pytest.mark.parametrize("values", [None, 18])
@pytest.mark.parametrize("leading", [(), (2,), (2, 1, 3)])
def test_leading_dimensions(leading: tuple[int, ...], values: int | None, device: torch.device) -> None:
    z, given, upstream = inputs(*leading, 9, 20, values=values, device=device, dtype=torch.float32)
    assert z is not None
    assert upstream is not None
    lengths = torch.arange(1, 1 + torch.Size(leading).numel(), device=device).view(leading)
    assert_is_the_formula(z, given, upstream, scale=0.7, energy=True)
    assert_is_the_formula(z, given, upstream, lengths=lengths)


@pytest.mark.parametrize(
    ("more", "width", "values", "kernel"),
    [
        (0, 20, None, "packed"),
        (0, 20, 18, "packed"),
        (0, 257, None, "packed"),
        (1, 20, None, "streaming"),
        (1, 20, 18, "streaming"),
        (1, 256, None, "streaming"),
        (1, 257, None, None),
        (1, 20, 257, None),
    ],
)
def test_which_kernel_takes_what(
    more: int, width: int, values: int | None, kernel: str | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.float32
    tokens = LONGEST + more
    called = []
    for name, direction in itertools.product(("packed", "streaming"), ("forward", "backward")):
        launcher = getattr(dispatch, f"{name}_{direction}")
        monkeypatch.setattr(
            dispatch,
            f"{name}_{direction}",
            lambda attention, launcher=launcher, name=name: (called.append(name), launcher(attention))[1],
        )
    z, given, upstream = inputs(2, tokens, width, values=values, device=device, dtype=dtype)
    assert z is not None
    assert upstream is not None
    assert_is_the_formula(z, given, upstream, lengths=torch.tensor([tokens, 5], device=device))
    assert called == [kernel] * 2 * (kernel is not None)


def test_the_remainder_is_kept_in_16_bits_where_a_backward_may_come(device: torch.device, dtype: torch.dtype) -> None:
    for tokens, keeps in itertools.product((LONGEST, LONGEST + 1), (False, True)):
        z = normal(1, 2, tokens, 20).to(device, dtype)
        *_, kept = symmetric_attention_forward(SymmetricAttentionArguments(z=z, keeps=keeps))
        expected = z.shape if keeps and tokens > LONGEST and z.element_size() == 2 else (0,)
        assert (kept.shape, kept.dtype) == (expected, dtype)


@pytest.mark.parametrize("tokens", [7, 70])
def test_strided_and_expanded_inputs(tokens: int, device: torch.device) -> None:
    z, values, upstream = inputs(2, tokens, 20, values=18, device=device, dtype=torch.float32)
    assert z is not None
    assert values is not None
    assert upstream is not None
    expected = assert_is_the_formula(z, values, upstream)
    strided = [tensor.mT.contiguous().mT for tensor in (z, values, upstream)]
    assert not any(tensor.is_contiguous() for tensor in strided)
    for mine, clean in zip(attend(ops.symmetric_attention, strided[:2], strided[2]), expected, strict=True):
        assert torch.equal(mine, clean)
    # One sequence for all, one token for all, one number for all: stride 0.
    assert_is_the_formula(z[:1].expand(2, -1, -1), values[:, :1].expand(-1, tokens, -1), upstream)
    assert_is_the_formula(z, values, torch.tensor(0.7, device=device).expand(upstream.shape))


@pytest.mark.parametrize(("tokens", "width"), [(7, 20), (70, 20), (70, 257)])  # packed, streaming, wide
def test_strided_and_expanded_lengths(tokens: int, width: int, device: torch.device) -> None:
    z, values, upstream = inputs(3, tokens, width, values=18, device=device, dtype=torch.float32)
    assert upstream is not None
    lengths = torch.full((3,), 5, device=device)
    expected = attend(ops.symmetric_attention, [z, values], upstream, lengths=lengths)
    for given in (torch.stack([lengths, lengths + 2], 1)[:, 0], lengths[:1].expand(3)):
        assert not given.is_contiguous()
        for mine, clean in zip(
            attend(ops.symmetric_attention, [z, values], upstream, lengths=given), expected, strict=True
        ):
            assert torch.equal(mine, clean)


@pytest.mark.parametrize("tokens", [7, 70])
def test_frozen_inputs(tokens: int, device: torch.device) -> None:
    z, values, upstream = inputs(2, tokens, 20, values=18, device=device, dtype=torch.float32)
    assert z is not None
    assert values is not None
    assert upstream is not None
    full = attend(ops.symmetric_attention, [z, values], upstream)
    for index, trained in enumerate((z, values)):
        leaf = trained.detach().requires_grad_()
        output = ops.symmetric_attention(*((leaf, values) if index == 0 else (z, leaf)))
        (gradient,) = torch.autograd.grad(output, leaf, upstream)
        assert torch.allclose(gradient.cpu(), full[1 + index], atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (3, 0), (0, 70, 4), (2, 70, 0)])
def test_empty_batches_sequences_and_widths(shape: tuple[int, ...], device: torch.device) -> None:
    z = torch.zeros(shape, device=device, requires_grad=True)
    output = ops.symmetric_attention(z, energy=True)
    assert output.shape == shape
    output.sum().backward()
    assert z.grad is not None
    assert z.grad.shape == shape


@pytest.mark.parametrize("tokens", [7, 70])
def test_without_a_width_every_token_gets_the_mean(tokens: int, device: torch.device) -> None:
    values = normal(1, 2, tokens, 3).float().to(device)
    output = ops.symmetric_attention(values[..., :0], values)
    assert torch.allclose(output, values.mean(-2, keepdim=True).expand_as(values), atol=1e-6)


def test_float64_is_refused_with_the_reason(device: torch.device) -> None:
    z = normal(1, 2, 5, 4).to(device)
    with pytest.raises(InputError, match=r"cannot run symmetric_attention here: .* not in float64"):
        ops.symmetric_attention(z)
    with ops.use_backend("auto"):
        output = ops.symmetric_attention(z)
    with ops.use_backend("torch"):
        assert torch.equal(ops.symmetric_attention(z), output)
