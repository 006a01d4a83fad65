"""Gradients are clipped by their norm."""

from __future__ import annotations

import pytest
import torch

from cdt_fast.training.optimizer import _clip_gradients


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_gradients_are_clipped_by_their_exact_norm(size: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((5, 256, 1024), (7,), ())]
    generator = torch.Generator().manual_seed(0)
    given = [size * 1e-3 * torch.randn(each.shape, generator=generator) for each in parameters]
    for parameter, gradient in zip(parameters, given, strict=True):
        parameter.grad = gradient.clone()
    _clip_gradients(parameters)
    norm = torch.cat([each.double().flatten() for each in given]).norm()
    for parameter, gradient in zip(parameters, given, strict=True):
        expected = gradient.double() * (1 / norm.clamp(min=1.0))
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=3e-6, atol=0.0)
    _clip_gradients([])
