"""Mixed precision by accelerate, which puts a function of its own in the place of a model's forward."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cdt_fast import attach_layer_losses, with_descent
from tests.integrations.integration_cases import ASCENT, language_model, rows, stacked
from tests.models.layer_loss_cases import build, inputs_of

accelerate: Any = pytest.importorskip("accelerate", reason="the package 'accelerate' is not installed")

MAKERS = {"language model": lambda: language_model(torch.float32), "classifier": lambda: build("bert").float()}


def in_autocast(model: Any, inputs: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    attach_layer_losses(model)
    with torch.autocast("cpu", dtype):
        return model(**inputs).layer_losses.detach()


def prepared(model: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """As accelerate prepares it; for float16 it asks for a GPU, so that its lines stand here."""
    if dtype == torch.bfloat16:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        return accelerator.prepare(model), lambda model: accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    from accelerate.utils import convert_outputs_to_fp32, extract_model_from_parallel

    model._original_forward = model.forward
    function = torch.autocast("cpu", dtype)(model.forward.__func__)
    model.forward = type(model.forward)(function, model)
    model.forward = type(model.forward)(convert_outputs_to_fp32(model.forward.__func__), model)
    return model, lambda model: extract_model_from_parallel(model, keep_fp32_wrapper=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attached", ["before", "after"])
@pytest.mark.parametrize("kind", MAKERS)
def test_losses_are_those_in_autocast_and_the_model_is_copied_unwrapped_and_given_back(
    kind: str, attached: str, dtype: torch.dtype
) -> None:
    make = MAKERS[kind]
    inputs = stacked(rows(4)) if kind == "language model" else inputs_of("bert")
    expected = in_autocast(make().eval(), inputs, dtype)
    model = make().eval()
    plain = model(**inputs).loss
    handle = attach_layer_losses(model) if attached == "before" else None
    model, unwrapped = prepared(model, dtype)
    handle = handle or attach_layer_losses(model)
    output = model(**inputs)
    assert torch.equal(output.layer_losses, expected)
    output.loss.backward()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not torch.allclose(twin(**inputs).layer_losses, expected)
    model = unwrapped(model)
    assert "layer_losses" in model(**inputs)
    handle.remove()
    found = model(**inputs)
    assert "layer_losses" not in found
    # Attached around accelerate's function it is not seen there, and autocast stays.
    assert torch.equal(found.loss, plain) == (attached == "before")
    attach_layer_losses(model)
    assert "layer_losses" in model(**inputs)


def test_a_trainer_trains_in_bfloat16(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1}
    settings |= {"use_cpu": True, "bf16": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    arguments = transformers.TrainingArguments(str(tmp_path), **settings)
    model, data = language_model(torch.float32), rows(4)
    expected = in_autocast(language_model(torch.float32).train(), stacked(data), torch.bfloat16)
    trainer = with_descent(InOrder)(model, arguments, train_dataset=data, eval_dataset=data, constraints=ASCENT)
    trainer.train()
    first = trainer.state.log_history[0]
    found = torch.tensor([first[f"layer_loss_{depth}"] for depth in range(3)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # float32 sums of the same losses
    assert trainer.evaluate()["eval_layer_loss_2"] < expected[-1]
