"""Layer losses of a model with an adapter on its head: its shape alone, then that of peft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses import attach_layer_losses
from tests.models.layer_loss_cases import (
    CLASSIFIERS,
    LANGUAGE_MODELS,
    WEIGHTS,
    classifier,
    eager_losses,
    expected,
    gradients,
    language_model,
    rows,
    tokens,
)

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


class LowRank(nn.Module):
    """The shape of peft's `lora.Linear`: the wrapped layer, dictionaries of factors by adapter, and switches."""

    def __init__(self, base: nn.Linear, rank: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        factors = base.weight.new_empty(rank, base.in_features), base.weight.new_empty(base.out_features, rank)
        self.base_layer = base
        self.lora_A, self.lora_B = (
            nn.ModuleDict({"default": nn.Linear(factor.shape[1], factor.shape[0], bias=False)}) for factor in factors
        )
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout) if dropout else nn.Identity()})
        self.scaling = {"default": 1.5}
        self.active_adapters = ["default"]
        self.merged = self.disable_adapters = False
        self.use_dora = {"default": False}
        self.double().requires_grad_(True)
        base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.disable_adapters:
            return self.base_layer(x)
        down = self.lora_A["default"](self.lora_dropout["default"](x))
        return self.base_layer(x) + self.scaling["default"] * self.lora_B["default"](down)


@pytest.mark.parametrize("disabled", [False, True])
def test_low_rank_adapter_on_the_head(disabled: bool) -> None:
    model, inputs = language_model("phi-bias"), tokens()
    model.lm_head = LowRank(model.lm_head)
    model.lm_head.disable_adapters = disabled
    losses, _, _, gradient = expected(model, LANGUAGE_MODELS["phi-bias"], inputs, WEIGHTS, True)
    attach_layer_losses(model).weights = WEIGHTS
    output = model(**inputs)
    torch.testing.assert_close(output.layer_losses, losses, **EXACT)
    found = gradients(model, output.loss)
    torch.testing.assert_close(found, gradient, **EXACT)
    assert found["lm_head.lora_B.default.weight"].any() != disabled
    assert not found["lm_head.base_layer.weight"].any()


def test_adapter_that_is_no_shared_weight() -> None:
    model, inputs = language_model(), tokens()
    model.lm_head = LowRank(model.lm_head, dropout=0.1).eval()
    attach_layer_losses(model)
    model(**inputs)
    with pytest.raises(InputError, match=r"dropout of 0\.1"):
        model.train()(**inputs)
    model.lm_head.use_dora["default"] = True
    with pytest.raises(InputError, match="plain LoRA"):
        model.eval()(**inputs)


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", reason="the package 'peft' is not installed")


def adapted(peft: Any, model: Any, **options: Any) -> Any:
    """With a low-rank adapter that is not zero at first; `options` say on what."""
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **options)).double().eval()


def expected_of(wrapped: Any, family: Any, inputs: dict[str, Tensor], shifted: bool) -> Any:
    """`expected`, with what the wrapper calls in the place of a head that it holds twice."""
    model = wrapped.get_base_model()
    held = {name: child for name, child in model.named_children() if hasattr(child, "modules_to_save")}
    for name, child in held.items():
        setattr(model, name, child.modules_to_save["default"])
    losses, loss, count, _ = expected(model, family, inputs, WEIGHTS, shifted)
    for name, child in held.items():
        setattr(model, name, child)
    found = {name: p.grad for name, p in wrapped.named_parameters() if p.requires_grad}
    return losses, loss, count, found


PEFT = {
    "adapter on the head": ("llama", {"target_modules": ["q_proj", "lm_head"]}),
    "adapter beside the head": ("llama", {"target_modules": ["q_proj"]}),
    "a copy of the head is trained": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "classifier": ("roberta", {"target_modules": ["query", "out_proj"]}),
    "a copy of a classifier's head": ("roberta", {"target_modules": ["query"], "task_type": "SEQ_CLS"}),
}


@pytest.mark.parametrize("kind", PEFT)
def test_peft(kind: str, peft: Any) -> None:
    name, options = PEFT[kind]
    shifted = name == "llama"
    model, inputs = (language_model(), tokens()) if shifted else (classifier("roberta"), rows())
    wrapped = adapted(peft, model, **options)
    family = LANGUAGE_MODELS["llama"] if shifted else CLASSIFIERS["roberta"]
    losses, loss, count, gradient = expected_of(wrapped, family, inputs, shifted)
    assert all(value is not None for value in gradient.values())
    handle = attach_layer_losses(wrapped)
    handle.weights = WEIGHTS
    output = wrapped(**inputs)
    torch.testing.assert_close(output.layer_losses, losses, **EXACT)
    torch.testing.assert_close(output.loss.detach(), loss, **EXACT)
    assert output.layer_loss_count == count
    wrapped.zero_grad()
    output.loss.backward()
    for parameter, value in gradient.items():
        torch.testing.assert_close(wrapped.get_parameter(parameter).grad, value, msg=parameter, **EXACT)


@pytest.mark.parametrize("where", ["in place", "unloaded"])
def test_merged_adapters(where: str, peft: Any) -> None:
    inputs, wrapped = tokens(), adapted(peft, language_model(), target_modules=["q_proj", "lm_head"])
    before = eager_losses(wrapped.get_base_model(), LANGUAGE_MODELS["llama"], inputs, True).detach()
    if where == "in place":
        handle = attach_layer_losses(wrapped)
        wrapped.merge_adapter()
        merged = wrapped
    else:
        merged = wrapped.merge_and_unload()
        handle = attach_layer_losses(merged)
    torch.testing.assert_close(merged(**inputs).layer_losses, before, **EXACT)
    if where == "in place":
        wrapped.unmerge_adapter()
        torch.testing.assert_close(wrapped(**inputs).layer_losses, before, **EXACT)
    handle.remove()


def test_an_adapter_of_another_kind_on_the_head_is_refused(peft: Any) -> None:
    scaled = peft.IA3Config(target_modules=["q_proj", "lm_head"], feedforward_modules=[])
    wrapped = peft.get_peft_model(language_model(), scaled)
    attach_layer_losses(wrapped)
    with pytest.raises(InputError, match="adapter of the head is a Linear: use plain LoRA"):
        wrapped(**tokens())
