"""Any class of transformers is right at every depth or refused; see `transformers_classes` for how it is judged."""

from __future__ import annotations

import re

import pytest
import transformers

from tests.models import transformers_classes
from tests.models.transformers_classes import NOT_BUILT, REFUSED, RIGHT, WRONG, class_names, judge

# Each with what is special about it.
RIGHT_CLASSES = {
    "LlamaForCausalLM": "as most",
    "BartForCausalLM": "labels are not shifted, nor is its decoder all of its base model",
    "NanoChatForCausalLM": "its final norm runs on the embeddings too",
    "RecurrentGemmaForCausalLM": "bounds its logits, under a name of its own",
    "MiniCPM3ForCausalLM": "scales what its head is given",
    "Llama4ForCausalLM": "its prefix names no part of it",
    "BlenderbotForCausalLM": "its num_hidden_layers is that of an encoder it does not have",
    "OpenAIGPTLMHeadModel": "its layers answer with lists",
    "Zamba2ForCausalLM": "two kinds of layers, one of them with the embeddings as an argument",
    "BigBirdForSequenceClassification": "what its base pools is not what its head reads",
    "MegatronBertForSequenceClassification": "a final norm of another name",
    "Wav2Vec2ForSequenceClassification": "a norm of such a name stands before its layers",
    "LlavaForConditionalGeneration": "beside its language model it has one of pictures",
    "DebertaV2ForTokenClassification": "a label a token",
    "CanineForSequenceClassification": "does not say which its word embeddings are",
    "CLIPForImageClassification": "its prefix names no part of it; its post_layernorm is for pooled rows alone",
    "SiglipForImageClassification": "its post_layernorm is the final norm",
}
REFUSED_CLASSES = {
    "BertLMHeadModel": r"its head \(BertOnlyMLMHead\) is more than one linear map",
    "T5ForSequenceClassification": "it has an encoder and a decoder",
    "WhisperForConditionalGeneration": "it has an encoder and a decoder",
    "Kosmos2ForConditionalGeneration": r"its head \(Kosmos2TextForCausalLM\) is more than one linear map",
    "AlbertForSequenceClassification": r"it holds 0 lists of 4 layers \(num_hidden_layers\)",
    "ResNetForImageClassification": "its configuration states no num_hidden_layers",
    "SegformerForImageClassification": r"its layers do not refine one state: it has the shape \(2, 3,",
    "XLNetForSequenceClassification": "its layers are given 12 rows of tokens where it returns 2",
    "Gemma3nForCausalLM": "has another shape",
    "Inkling2ForCausalLM": "logits read from depth 3 and its own without its last 1 of 4 layers differ by",
}


@pytest.mark.parametrize("name", [*RIGHT_CLASSES, *REFUSED_CLASSES])
def test_right_or_refused(name: str) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    verdict = judge(name)
    assert verdict.kind == (RIGHT if name in RIGHT_CLASSES else REFUSED), verdict
    if name in REFUSED_CLASSES:
        assert re.match(f"no layer losses for a {name}: .*{REFUSED_CLASSES[name]}", verdict.reason)


@pytest.mark.slow
@pytest.mark.parametrize("name", class_names())
def test_every_class(name: str) -> None:
    verdict = judge(name)
    assert verdict.kind in (RIGHT, REFUSED, NOT_BUILT), verdict


def test_a_wrong_loss_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = transformers_classes.true_losses
    monkeypatch.setattr(transformers_classes, "true_losses", lambda *args: [loss + 1e-3 for loss in truth(*args)])
    assert judge("LlamaForCausalLM").kind == WRONG
