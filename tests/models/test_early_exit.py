"""Classifiers that leave early: the threshold by counting all of them, rows by their logits, layers by their calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.models import TextUT, calibrate_confidence
from cdt_fast.models.early_exit import confidence_of, exits_taken, least_threshold, leave_early, wilson_interval

WORDS, CLASSES, LAYERS = 11, 3, 3


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def texts(rows: int = 12, seed: int = 1) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, WORDS, (rows, 7), generator=generator(seed))
    return ids, torch.randint(1, 8, (rows,), generator=generator(seed + 1))


def made(**options: Any) -> TextUT:
    torch.manual_seed(3)
    model = TextUT((WORDS, 6), CLASSES, LAYERS, **options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.7 * torch.randn(parameter.shape, generator=generator(3), dtype=torch.float64)
    return model


def expected_answers(logits: list[Tensor], threshold: float) -> tuple[Tensor, list[int]]:
    """Row by row: the logits of the first depth that is sure."""
    found, depths = [], []
    for row in range(len(logits[0])):
        sure = [depth for depth, each in enumerate(logits) if each[row].softmax(-1).max() >= threshold]
        depths.append(sure[0] if sure and threshold < 1 else len(logits) - 1)
        found.append(logits[depths[-1]][row])
    return torch.stack(found), depths


@pytest.mark.parametrize("exits", [1, 3])
@pytest.mark.parametrize("agreement", [0.6, 0.8, 0.9])
def test_the_threshold_is_the_least_of_all_that_keep_the_agreement(exits: int, agreement: float) -> None:
    confidence = torch.rand(200, exits, generator=generator(0), dtype=torch.float64).mul(50).round().div(50)  # ties
    agrees = torch.rand(200, exits, generator=generator(1), dtype=torch.float64) < 0.3 + 0.8 * confidence
    confidence[3, 0] = 1.0  # what rounding makes of sure: no threshold of it is sought
    found = least_threshold(confidence, agrees, agreement)
    kept = {}
    for threshold in confidence[confidence < 1].unique().tolist():
        right, left = 0, 0
        for sure, agreed in zip((confidence >= threshold).tolist(), agrees.tolist(), strict=True):
            right += agreed[sure.index(True)] if any(sure) else 1
            left += any(sure)
        if wilson_interval(right, 200)[0] >= agreement:
            kept[threshold] = right / 200, wilson_interval(right, 200)[0], left / 200
    assert found.threshold == min(kept)
    assert (found.agreement, found.least_agreement, found.exit_share) == kept[found.threshold]
    rounded = least_threshold(torch.ones(200, exits).double(), torch.ones(200, exits).bool(), agreement)
    assert (rounded.threshold, rounded.exit_share) == (1.0, 0.0)
    none = least_threshold(confidence[:50], agrees[:50], 0.99)  # too few to know
    assert (none.threshold, none.agreement, none.exit_share) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    "options", [{}, {"residual": "input", "width": 4}, {"residual": "bias", "tied": True}], ids=str
)
@pytest.mark.parametrize("padded", ["lengths", "mask", "neither"])
def test_every_text_is_answered_by_the_first_depth_that_is_sure(options: dict[str, Any], padded: str) -> None:
    model, (ids, lengths) = made(**options), texts()
    places: dict[str, Any] = {"lengths": lengths} if padded == "lengths" else {}
    if padded == "mask":
        places = {"attention_mask": torch.arange(7) < lengths.unsqueeze(1)}
    logits = model.depth_logits(ids, **places)
    left: set[int] = set()
    for threshold in (0.0, 0.6, 0.8, 0.9, 1.0):
        expected, depths = expected_answers(logits, threshold)
        answers = model.classify(ids, threshold, **places)
        assert answers.depths.tolist() == depths == exits_taken(confidence_of(logits)[0], threshold).tolist()
        torch.testing.assert_close(answers.logits, expected, rtol=1e-10, atol=1e-12)
        left |= set(depths)
    assert len(left) > 2  # the cases hold exits that differ


def test_texts_that_have_left_cost_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from cdt_fast.models import text_ut

    model, (ids, lengths) = made(), texts()
    depths = torch.tensor(expected_answers(model.depth_logits(ids, lengths=lengths), 0.8)[1])
    rows: list[int] = []
    original = text_ut.ops.symmetric_attention

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        rows.append(len(args[0]))
        return original(*args, **kwargs)

    monkeypatch.setattr(text_ut.ops, "symmetric_attention", counted)
    model.classify(ids, 0.8, lengths=lengths)
    assert rows == [int((depths >= layer).sum()) for layer in range(1, LAYERS + 1) if (depths >= layer).any()]
    assert rows[-1] < len(ids)


def test_the_calibrated_threshold_keeps_the_agreement_of_the_texts_it_was_chosen_on() -> None:
    model, (ids, lengths) = made(), texts(400)
    batches = zip(ids.split(150), lengths.split(150), strict=True)
    found = calibrate_confidence([model.depth_logits(part, lengths=longs) for part, longs in batches], agreement=0.8)
    answers, last = model.classify(ids, found.threshold, lengths=lengths), model(ids, lengths=lengths)
    assert (answers.logits.argmax(-1) == last.argmax(-1)).double().mean().item() == pytest.approx(found.agreement)
    assert (answers.depths < LAYERS).double().mean().item() == pytest.approx(found.exit_share)
    assert found.agreement > found.least_agreement >= 0.8
    assert found.exit_share > 0


def test_what_does_not_fit_is_refused() -> None:
    model, (ids, lengths) = made(), texts()
    logits = model.depth_logits(ids)
    for threshold in (-0.1, 1.5, float("nan"), "sure"):
        with pytest.raises(InputError, match="threshold must be a number in"):
            model.classify(ids, threshold)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"tokens must be ids \[B, T\]"):
        model.classify(ids[0], 0.9)
    with pytest.raises(InputError, match="lengths"):
        model.classify(ids, 0.9, lengths=lengths[:3])
    for agreement in (0.0, 1.0, 2.0):
        with pytest.raises(InputError, match="agreement must be"):
            calibrate_confidence([logits], agreement)
    with pytest.raises(InputError, match="at least one row"):
        calibrate_confidence([])
    with pytest.raises(InputError, match="at least one row"):
        calibrate_confidence([[each[:0] for each in logits]])
    with pytest.raises(InputError, match="at least two depths"):
        calibrate_confidence([logits[:1]])
    with pytest.raises(InputError, match="at least two depths, got shapes"):
        calibrate_confidence([[logits[0], logits[1][:, :2]]])
    with pytest.raises(InputError, match="must be finite"):
        calibrate_confidence([[logits[0], logits[1] * float("nan")]])


def test_at_a_threshold_of_one_nobody_leaves_however_sure() -> None:
    logits = torch.tensor([[200.0, 0.0, 0.0]])
    answers = leave_early(range(3), 1.0, lambda depth, kept: logits * (depth + 1))
    assert answers.depths.tolist() == [2]
    assert exits_taken(torch.ones(1, 3).double(), 1.0).tolist() == [2]


def test_a_depth_that_is_not_a_number_is_never_sure() -> None:
    logits = [torch.full((2, 3), float("nan")), torch.tensor([[9.0, 0, 0], [0, 0, 9.0]])]
    answers = leave_early(range(2), 0.5, lambda depth, kept: logits[depth] if kept is None else logits[depth][kept])
    assert answers.depths.tolist() == [1, 1]
    assert torch.equal(answers.logits, logits[1])


def transformers_cases() -> Any:
    pytest.importorskip("transformers")
    from tests.models import layer_loss_cases

    return layer_loss_cases


FAMILIES = ["bert", "distilbert", "roberta", "electra", "deberta-v2", "mpnet", "modernbert", "llama", "vit"]


@pytest.mark.parametrize("pooling", ["own", "mean"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_row_of_a_transformers_classifier(name: str, pooling: Any) -> None:
    from cdt_fast import attach_layer_losses

    cases = transformers_cases()
    model = cases.classifier(name)
    inputs = {key: value for key, value in cases.rows(name, batch=12).items() if key != "labels"}
    if pooling == "mean" and name == "vit":
        pytest.skip("its rows have no mask")
    handle = attach_layer_losses(model, inner_pooling=pooling)
    logits = handle.depth_logits(**inputs)
    with torch.no_grad():
        own = model(**inputs).logits
    confidence = confidence_of(logits)[0]
    some = confidence[:, :-1].flatten().quantile(torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)).tolist()
    for threshold in (0.0, *some, 1.0):
        expected, depths = expected_answers(logits, threshold)
        answers = handle.classify(threshold, **inputs, labels=None)
        assert answers.depths.tolist() == depths
        torch.testing.assert_close(answers.logits, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(handle.classify(1.0, **inputs).logits, own, rtol=1e-6, atol=1e-6)
    handle.remove()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, own)
    with pytest.raises(InputError, match="were removed"):
        handle.classify(0.5, **inputs)


def test_layers_of_a_transformers_classifier_run_once_on_the_rows_that_are_left() -> None:
    from cdt_fast import attach_layer_losses

    cases = transformers_cases()
    model, inputs = cases.classifier(), cases.rows(batch=12)
    handle = attach_layer_losses(model.train(), taps=[0, 1, len(model.base_model.encoder.layer)])
    logits = handle.depth_logits(**inputs)
    threshold = confidence_of(logits)[0][:, :2].median().item()
    depths = handle.classify(threshold, **inputs).depths
    rows: list[list[int]] = [[] for _ in model.base_model.encoder.layer]
    hooks = [
        layer.attention.register_forward_hook(lambda module, args, output, found=found: found.append(len(args[0])))
        for layer, found in zip(model.base_model.encoder.layer, rows, strict=True)
    ]
    assert torch.equal(handle.classify(threshold, **inputs).depths, depths)
    for hook in hooks:
        hook.remove()
    assert rows == [[int((depths > layer).sum())] for layer in range(len(rows))]
    assert 0 < rows[-1][0] < 12
    assert model.training


def test_a_model_that_cannot_leave_early_is_refused() -> None:
    from cdt_fast import attach_layer_losses

    cases = transformers_cases()
    inputs = cases.rows()
    with pytest.raises(InputError, match="a language model leaves early in generate, with confident_decoder"):
        attach_layer_losses(cases.language_model()).classify(0.5, **cases.tokens())
    with pytest.raises(InputError, match=r"classify reads the last depth, .* add it to taps"):
        attach_layer_losses(cases.classifier(), taps=[0, 1]).classify(0.5, **inputs)
    model = cases.classifier()
    handle = attach_layer_losses(model)
    with pytest.raises(InputError, match="threshold must be"):
        handle.classify(2.0, **inputs)
    with pytest.raises(InputError, match="at least one row"):
        handle.classify(0.5)
    own = model(**inputs).logits

    # What a layer leaves for the next one is lost between the segments.
    first, second = model.base_model.encoder.layer[:2]
    noted: dict[str, Tensor] = {}
    hooks = [
        model.base_model.embeddings.register_forward_hook(lambda *_: noted.clear()),
        first.attention.register_forward_hook(lambda module, args, output: noted.update(seen=args[0])),
        second.output.register_forward_hook(lambda module, args, output: output + noted.pop("seen", 0.0)),
    ]
    handle.remove()
    handle = attach_layer_losses(model)
    with pytest.raises(InputError, match="run one part at a time, its logits at depth 2 differ"):
        handle.classify(0.5, **inputs)
    for hook in hooks:
        hook.remove()
    assert torch.equal(model(**inputs).logits, own)
