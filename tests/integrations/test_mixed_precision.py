"""Mixed precision by accelerate, which puts a function of its own in the place of a model's forward."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import Accelerator

from cdt_fast import attach_layer_losses
from tests.integrations.integration_cases import language_model, rows, stacked
from tests.models.layer_loss_cases import build, inputs_of

MAKERS = {"language model": lambda: language_model(torch.float32), "classifier": lambda: build("bert").float()}


@pytest.mark.parametrize("attached", ["before", "after"])
@pytest.mark.parametrize("kind", MAKERS)
def test_losses_are_those_in_autocast_and_the_model_is_copied_unwrapped_and_given_back(
    kind: str, attached: str
) -> None:
    inputs = stacked(rows(4)) if kind == "language model" else inputs_of("bert")
    model, other = (MAKERS[kind]().eval() for _ in range(2))
    attach_layer_losses(other)
    with torch.autocast("cpu", torch.bfloat16):
        expected = other(**inputs).layer_losses
    plain = model(**inputs).loss
    handle = attach_layer_losses(model) if attached == "before" else None
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(model)
    handle = handle or attach_layer_losses(model)
    output = model(**inputs)
    assert torch.equal(output.layer_losses, expected)
    output.loss.backward()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not torch.allclose(twin(**inputs).layer_losses, expected)
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert "layer_losses" in model(**inputs)
    handle.remove()
    found = model(**inputs)
    assert "layer_losses" not in found
    # Attached around accelerate's function it is not seen there, and autocast stays.
    assert torch.equal(found.loss, plain) == (attached == "before")
    attach_layer_losses(model)
    assert "layer_losses" in model(**inputs)
