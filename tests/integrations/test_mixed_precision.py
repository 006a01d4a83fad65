"""Mixed precision by accelerate, which puts a function of its own in the place of a model's forward."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cdt_fast import attach_layer_losses, with_descent
from tests.integrations.integration_cases import (
    ASCENT,
    SETTINGS,
    evaluated,
    in_order,
    language_model,
    logged,
    rows,
    stacked,
)
from tests.models.layer_loss_cases import build, inputs_of

accelerate: Any = pytest.importorskip("accelerate", reason="the package 'accelerate' is not installed")

MAKERS = {"language model": lambda: language_model(torch.float32), "classifier": lambda: build("bert").float()}


def in_autocast(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    attach_layer_losses(model)
    with torch.autocast("cpu", torch.bfloat16):
        return model(**inputs).layer_losses.detach()


@pytest.mark.parametrize("attached", ["before", "after"])
@pytest.mark.parametrize("kind", MAKERS)
def test_losses_are_those_in_autocast_and_the_model_is_copied_unwrapped_and_given_back(
    kind: str, attached: str
) -> None:
    make = MAKERS[kind]
    inputs = stacked(rows(4)) if kind == "language model" else inputs_of("bert")
    expected = in_autocast(make().eval(), inputs)
    model = make().eval()
    plain = model(**inputs).loss
    handle = attach_layer_losses(model) if attached == "before" else None
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
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


def test_a_trainer_trains_in_bfloat16(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 2}
    arguments = transformers.TrainingArguments(str(tmp_path), **{**SETTINGS, **changes, "bf16": True})
    model, data = language_model(torch.float32), rows(4)
    expected = in_autocast(language_model(torch.float32).train(), stacked(data))
    kind = with_descent(in_order(transformers.Trainer))
    trainer = kind(model, arguments, train_dataset=data, eval_dataset=data, constraints=ASCENT)
    trainer.train()
    # float32 sums of the same losses
    torch.testing.assert_close(logged(trainer)[0], expected.double(), rtol=0, atol=1e-6)
    assert evaluated(trainer)[2] < expected[-1]
