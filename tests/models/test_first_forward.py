"""The check of the first forward with labels: what it sees, and that it leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses import attach_layer_losses
from cdt_fast.sequence.perturbation import perturbed
from tests.models.layer_loss_cases import VOCABULARY, WEIGHTS, classifier, language_model, rows, tokens


def bart(**settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, **settings}
    config = transformers.BartConfig(vocab_size=VOCABULARY, is_decoder=True, is_encoder_decoder=False, **sizes)
    return transformers.BartForCausalLM(config).eval()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_whether_labels_are_shifted_is_asked_of_the_forward(device: str) -> None:
    with torch.device(device):
        models = {True: language_model(), False: bart()}
    for expected, model in models.items():
        assert attach_layer_losses(model).shifts_labels == expected


def test_a_model_that_does_not_shift_counts_every_label() -> None:
    model, inputs = bart(), tokens()
    plain = model(**inputs).loss
    attach_layer_losses(model)
    output = model(**inputs)
    assert output.layer_loss_count == (inputs["labels"] != -100).sum()
    torch.testing.assert_close(output.loss, plain, rtol=1e-6, atol=0)


class Reduced(transformers.LlamaForCausalLM):
    """A loss of its own: label smoothing, in a forward that is like any other."""

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if labels is not None:
            assert output.logits is not None
            logits, targets = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            output.loss = nn.functional.cross_entropy(logits, targets, label_smoothing=0.01)
        return output


def test_a_loss_that_is_no_cross_entropy_is_refused_with_both_numbers() -> None:
    plain = language_model()
    model = Reduced(plain.config).double().eval()
    model.load_state_dict(plain.state_dict())
    attach_layer_losses(model)
    with pytest.raises(InputError, match=r"for a Reduced: \d\.\d+ is read from depth 3 .* its own loss is \d\.\d+"):
        model(**tokens())


class Counted(nn.Dropout):
    """Dropout that counts its calls in evaluation mode, and has a buffer that only training changes."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("make", [language_model, classifier])
def test_nothing_is_changed(make: Any) -> None:
    shifted = make is language_model
    inputs: dict[str, Any] = tokens() if shifted else rows()
    models = [make(), make()]
    for model in models:
        model.base_model.add_module("counted", Counted())
        model.get_input_embeddings().register_forward_hook(
            lambda module, args, output, of=model: of.base_model.counted(output)
        )
        model.train()
        model.base_model.config.problem_type = None
    handle = attach_layer_losses(models[1])
    handle.weights = WEIGHTS
    first, second = [], []
    for outputs, model in zip((first, second), (models[1], models[1]), strict=True):
        torch.manual_seed(5)
        outputs.append(model(**inputs).layer_losses)
    torch.testing.assert_close(first, second, rtol=0, atol=0)  # with the check, and without
    assert models[1].base_model.counted.calls == 2
    assert all(module.training for module in models[1].modules())
    torch.manual_seed(5)
    plain = models[0](**inputs).loss
    torch.testing.assert_close(first[0][-1].to(plain.dtype), plain.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("make", [language_model, classifier])
def test_noise_on_the_embeddings_is_not_drawn_for_the_check(make: Any) -> None:
    model, inputs = make(), tokens() if make is language_model else rows()
    attach_layer_losses(model)
    with perturbed(model, gamma=0.5, padding_id=0) as perturbation:
        first = model(**inputs).layer_losses
        assert perturbation.next_sample == len(inputs["input_ids"])
        perturbation.next_sample = 0
        torch.testing.assert_close(model(**inputs).layer_losses, first, rtol=0, atol=0)


@pytest.mark.parametrize("make", [language_model, classifier])
def test_a_saved_model_knows_nothing_of_its_layer_losses(make: Any, tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path / "plain")
    handle = attach_layer_losses(model)
    model(**(tokens() if make is language_model else rows()))
    model.save_pretrained(tmp_path / "attached")
    handle.remove()
    model.save_pretrained(tmp_path / "removed")
    plain, *others = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "attached", "removed")
    )
    assert others == [plain, plain]
    again = type(model).from_pretrained(tmp_path / "attached")
    assert "layer_losses" not in again(**(tokens() if make is language_model else rows()))
