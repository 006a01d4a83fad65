"""Mixtures of experts: the loss of their routers stays in the loss, as the models themselves add it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses import attach_layer_losses, outputs
from tests.models.layer_loss_cases import MIXTURES, WEIGHTS, eager_losses, gradients, language_model, tokens

EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
ROUTED: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}  # gradients pass through routers that compute in float32
FACTOR = 0.7


def mixture(name: str) -> Any:
    if not hasattr(transformers, MIXTURES[name].config):
        pytest.skip(f"transformers {transformers.__version__} has no {MIXTURES[name].config}")
    factor = "aux_loss_coef" if name == "jetmoe" else "router_aux_loss_coef"
    model = language_model(name, **{factor: FACTOR})
    if not hasattr(model, "num_experts"):
        pytest.skip(f"the router loss of {type(model).__name__} fails in transformers {transformers.__version__}")
    return model


@pytest.mark.parametrize("name", MIXTURES)
def test_the_router_loss_is_in_the_loss(name: str) -> None:
    model, inputs = mixture(name), tokens()
    plain = model(**inputs)
    assert plain.aux_loss > 0.1
    losses = eager_losses(model, MIXTURES[name], inputs, True)
    count = int((inputs["labels"][:, 1:] != -100).sum())
    loss = torch.tensor(WEIGHTS, dtype=torch.float64) @ losses + FACTOR * plain.aux_loss
    gradient = gradients(model, loss)
    handle = attach_layer_losses(model)
    handle.weights = WEIGHTS
    output = model(**inputs)
    torch.testing.assert_close(output.layer_losses, losses.detach(), **EXACT)
    torch.testing.assert_close(output.loss.detach(), loss.detach(), **EXACT)
    torch.testing.assert_close(output.aux_loss, plain.aux_loss)
    for parameter, value in gradients(model, output.loss).items():
        torch.testing.assert_close(
            value, gradient[parameter], msg=lambda text, name=parameter: f"{name}: {text}", **ROUTED
        )
    # A number of items divides the cross-entropy alone.
    halved = model(**inputs, num_items_in_batch=2 * count).loss
    torch.testing.assert_close(halved - FACTOR * plain.aux_loss, (loss - FACTOR * plain.aux_loss) / 2, **EXACT)
    handle.weights = None
    torch.testing.assert_close(model(**inputs).loss, plain.loss, rtol=1e-6, atol=0, check_dtype=False)
    output = model(**inputs, output_router_logits=False)
    torch.testing.assert_close(output.loss.detach(), losses[-1].detach(), **EXACT)


def test_a_router_loss_of_unknown_weight_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = mixture("mixtral"), tokens()
    attach_layer_losses(model)
    monkeypatch.setattr(outputs, "_ROUTER_FACTORS", ("another_name",))
    with pytest.raises(InputError, match=r"MixtralForCausalLM with a router loss.*output_router_logits = False"):
        model(**inputs)
    assert model(**inputs, output_router_logits=False).layer_loss_count > 0
