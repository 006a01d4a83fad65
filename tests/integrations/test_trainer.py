"""with_descent(Trainer) against the loop written out, its checkpoints, its logs and what it refuses."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from cdt_fast import DescentConstraints, InputError, attach_layer_losses, with_descent
from tests.integrations.integration_cases import (
    ASCENT,
    LEARNING_RATE,
    RATE,
    REFERENCE,
    SETTINGS,
    assert_same_weights,
    eager_losses,
    evaluated,
    expected_run,
    in_order,
    language_model,
    logged,
    rows,
    stacked,
)
from tests.runs import flat

STATE_FILE = "descent_constraints.safetensors"


def trainer_for(folder: Path, constraints: Any = ASCENT, kind: Any = None, count: int = 5, **changes: Any) -> Any:
    """Return a trainer by plain gradient descent, as in the loop written out."""
    names = inspect.signature(TrainingArguments).parameters
    settings = {name: changes.pop(name) for name in list(changes) if name in names}
    arguments = TrainingArguments(str(folder), **{**SETTINGS, "max_steps": 6, **settings})
    model = changes.pop("model", None) or language_model()
    optimizers = (torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), None)
    given = {"train_dataset": rows(count), "eval_dataset": rows(count), "optimizers": optimizers, **changes}
    return with_descent(kind or in_order(Trainer))(model, arguments, constraints=constraints, **given)


def test_it_is_the_loop_written_out(tmp_path: Path) -> None:
    # Five rows: the last step of an epoch has one micro-batch where the others have two.
    trainer = trainer_for(tmp_path)
    trainer.train()
    multipliers, losses, weights = expected_run([[0, 1], [2, 3], [4]] * 2, count=5)
    assert multipliers.min() > 0
    torch.testing.assert_close(logged(trainer, "multiplier"), multipliers, rtol=0, atol=1e-10)
    torch.testing.assert_close(logged(trainer, "layer_loss"), losses, rtol=0, atol=1e-10)
    assert_same_weights(trainer.model, weights)
    before = torch.cat([torch.zeros(1, 3, dtype=torch.float64), multipliers[:-1]])
    factor = 1 - RATE
    lagrangians = (before[:, 0] - factor * before[:, 1]) * losses[:, 0]
    lagrangians += (before[:, 1] - factor * before[:, 2]) * losses[:, 1] + (1 + before[:, 2]) * losses[:, 2]
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    torch.testing.assert_close(torch.tensor(found).double(), lagrangians, rtol=0, atol=1e-4)  # 4.48 rounds its log
    violations = losses[:, 1:] - factor * losses[:, :-1]
    torch.testing.assert_close(logged(trainer, "violation")[:, 0], losses[:, 0] - REFERENCE, rtol=0, atol=1e-10)
    torch.testing.assert_close(logged(trainer, "violation")[:, 1:], violations, rtol=0, atol=1e-10)
    assert all(entry["feasible"] == 0 for entry in trainer.state.log_history if "loss" in entry)


def test_in_bfloat16_the_losses_are_those_in_autocast(tmp_path: Path) -> None:
    model, other = (language_model(torch.float32).train() for _ in range(2))
    attach_layer_losses(other)
    with torch.autocast("cpu", torch.bfloat16):
        expected = other(**stacked(rows(4))).layer_losses.detach()
    changes: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 2}
    trainer = trainer_for(tmp_path, model=model, count=4, bf16=True, **changes)
    trainer.train()
    # float32 sums of the same losses
    torch.testing.assert_close(logged(trainer)[0], expected.double(), rtol=0, atol=1e-6)
    assert evaluated(trainer)[2] < expected[-1]


def test_a_step_that_the_gradient_scaler_skips_moves_no_multiplier(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, max_steps=4)
    # The first scale is too large for any loss, those after it for none.
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-127)
    trainer.train()
    multipliers, _, weights = expected_run([[2, 3], [4], [0, 1]], count=5)
    torch.testing.assert_close(logged(trainer, "multiplier")[1:], multipliers, rtol=0, atol=1e-10)
    assert not logged(trainer, "multiplier")[0].any()
    assert_same_weights(trainer.model, weights)


def test_logs_hold_the_losses_since_the_last_log(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, logging_steps=3)
    trainer.train()
    _, losses, _ = expected_run([[0, 1], [2, 3], [4]] * 2, count=5)
    counts = torch.tensor([[3.0], [7.0], [1.0]], dtype=torch.float64)  # labels of the rows of a step
    means = (losses.view(2, 3, 3) * counts).sum(1) / counts.sum()
    torch.testing.assert_close(logged(trainer, "layer_loss"), means, rtol=0, atol=1e-10)


def test_evaluation_is_plain_and_reports_the_depths(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, max_steps=2)
    trainer.train()
    metrics = trainer.evaluate()
    trainer.model.eval()
    with torch.no_grad():
        losses = eager_losses(trainer.model, stacked(rows(5)))
        of_batches = [eager_losses(trainer.model, stacked(rows(5)[start : start + 2]))[-1] for start in (0, 2, 4)]
    found = torch.tensor([metrics[f"eval_layer_loss_{depth}"] for depth in range(3)]).double()
    torch.testing.assert_close(found, losses, rtol=0, atol=1e-6)
    # The Trainer's own mean: batches by their rows.
    plain = (2 * of_batches[0] + 2 * of_batches[1] + of_batches[2]) / 5
    assert metrics["eval_loss"] == pytest.approx(plain.item(), abs=1e-6)
    assert metrics["eval_violation_1"] == pytest.approx((losses[1] - (1 - RATE) * losses[0]).item(), abs=1e-6)
    assert metrics["eval_feasible"] == 0.0
    assert trainer.predict(rows(3)).predictions.shape == (3, 6, 50)


def test_ignored_keys_leave_the_predictions_those_of_the_plain_trainer(tmp_path: Path) -> None:
    given: dict[str, Any] = {"compute_metrics": lambda given: {"sum": given.predictions.sum()}}
    keys = {"ignore_keys": ["past_key_values"]}
    trainer = trainer_for(tmp_path, eval_strategy="epoch", num_train_epochs=1, max_steps=-1, **given)
    trainer.train(ignore_keys_for_eval=keys["ignore_keys"])
    found, predicted = [*trainer.state.log_history, trainer.evaluate(**keys)], trainer.predict(rows(5), **keys)
    trainer.layer_losses.remove()
    plain: Any = Trainer(trainer.model, trainer.args, eval_dataset=rows(5), **given)  # type: ignore[arg-type]
    metrics = plain.evaluate(**keys)
    evaluations = [entry for entry in found if "eval_sum" in entry]
    for entry in evaluations:
        for name in ("eval_loss", "eval_sum"):
            assert entry[name] == pytest.approx(metrics[name], rel=1e-6)
    assert len(evaluations) == 2
    assert (predicted.predictions == plain.predict(rows(5), **keys).predictions).all()


def test_the_model_keeps_its_own_loss_between_the_steps_and_after_them(tmp_path: Path) -> None:
    model, batch, found = language_model(), stacked(rows(3)), []

    class Reads(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            found.append((model(**batch).loss.item(), eager_losses(model, batch)[-1].item()))

    trainer = trainer_for(tmp_path, model=model, max_steps=3, callbacks=[Reads()])
    trainer.train()
    assert trainer.constraints.multipliers.all()
    Reads().on_step_end()
    for loss, own in found:
        assert loss == pytest.approx(own, rel=1e-6)


def test_slacks_restart_each_epoch(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, {"rate": RATE, "dual_lr": 0.1}, gradient_accumulation_steps=1, max_steps=6, count=3)
    seen: list[bool] = []

    class Slacks(TrainerCallback):
        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            seen.append(bool(trainer.constraints.slacks.any()))

        on_step_end = on_epoch_begin

    trainer.add_callback(Slacks)
    trainer.train()
    assert seen == [False, False, True, True, False, True, True, True]  # λ moves first, then u


# After step 1 and 4 in the middle of an epoch, after step 3 at its end.
@pytest.mark.parametrize("step", [1, 3, 4])
def test_resume_is_bit_equal(step: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kind": Trainer, "count": 6, "unconstrained_steps": 2, "optimizers": (None, None)}
    settings |= {"save_strategy": "steps", "save_steps": 1}
    settings["constraints"] = {"rate": RATE, "reference": 3.0, "dual_lr": 0.1, "slack_cost": 1.0}
    whole = trainer_for(tmp_path / "whole", **settings)
    whole.train()
    folder = tmp_path / "whole" / f"checkpoint-{step}"
    assert not [path for path in folder.iterdir() if path.suffix == ".pkl"]
    resumed = trainer_for(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(folder))
    for (name, first), second in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(first, second), name
    assert flat(resumed.constraints.state_dict()) == flat(whole.constraints.state_dict())
    assert whole.constraints.multipliers.any()


def test_resume_without_a_state_is_refused(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
    trainer.train()
    (tmp_path / "checkpoint-1" / STATE_FILE).unlink()
    with pytest.raises(InputError, match=STATE_FILE):
        trainer_for(tmp_path, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_bounds_are_on_depths_that_are_read_and_are_logged(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, {"rate": None, "reference": None, "bounds": {2: 0.01}}, taps=[0, 2])
    trainer.train()
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert last["bound_multiplier_2"] > 0
    assert last["bound_violation_2"] == pytest.approx(last["layer_loss_2"] - 0.01)
    assert (last["bound_multiplier_0"], "bound_violation_0" in last) == (0.0, False)
    assert {"layer_loss_0", "multiplier_0", "multiplier_2"} <= last.keys()
    assert "layer_loss_1" not in last
    with pytest.raises(InputError, match=r"taps must end with the last depth, 2 or -1, .* got \[0, 1\]"):
        trainer_for(tmp_path, taps=[0, 1])
    with pytest.raises(InputError, match="bounds holds depth 1, which is not read: the depths are 0, 2"):
        trainer_for(tmp_path, {"bounds": {1: 0.5}}, taps=[0, 2])
    with pytest.raises(InputError, match="unconstrained_steps must be at least 1, as bounds holds a factor"):
        trainer_for(tmp_path, {"bounds": {2: "0.5x"}})
    continued = trainer_for(tmp_path, {"bounds": {2: "0.5x"}}, unconstrained_steps=1)
    continued.train()
    assert trainer_for(tmp_path, continued.constraints).constraints is continued.constraints


def test_a_metric_of_depths_is_to_be_the_least(tmp_path: Path) -> None:
    for name in ("layer_loss_1", "eval_violation_2"):
        with pytest.raises(InputError, match=f"greater_is_better, which asks for the greatest {name}: set it to False"):
            trainer_for(tmp_path, metric_for_best_model=name)
        trainer_for(tmp_path, metric_for_best_model=name, greater_is_better=False)
    trainer_for(tmp_path, greater_is_better=True)


def test_what_an_earlier_training_left_is_in_no_log(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, {"rate": None, "reference": None}, max_steps=5, logging_steps=3)
    trainer.train()
    model = language_model()
    model.load_state_dict(trainer.model.state_dict())
    trainer.train()
    fresh = trainer_for(tmp_path, trainer.constraints, model=model, max_steps=5, logging_steps=3)
    fresh.train()
    assert torch.equal(logged(trainer, "layer_loss"), logged(fresh, "layer_loss"))


class Endless(torch.utils.data.IterableDataset[Any]):
    """Rows without a number of them."""

    def __iter__(self) -> Any:
        return iter(rows(5))


def test_a_step_that_data_without_a_length_end_in_is_left_out(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, train_dataset=Endless())
    trainer.train()
    multipliers, _, weights = expected_run([[0, 1], [2, 3]] * 3)
    torch.testing.assert_close(trainer.constraints.multipliers, multipliers[-1], rtol=0, atol=1e-6)
    assert_same_weights(trainer.model, weights)


def test_a_step_without_labels_is_left_out_and_a_log_without_any_is_refused(tmp_path: Path) -> None:
    data = rows(4)
    for row in data[2:]:
        row["labels"] = torch.full_like(row["labels"], -100)
    trainer = trainer_for(tmp_path, train_dataset=data, max_steps=2, logging_steps=2)
    trainer.train()
    _, _, weights = expected_run([[0, 1]])
    assert_same_weights(trainer.model, weights)
    assert int(trainer.constraints.skipped_updates) == 1
    trainer = trainer_for(tmp_path, train_dataset=data[2:], max_steps=1)
    with pytest.raises(InputError, match="all are -100"):
        trainer.train()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    class OwnLoss(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    for kind, message in ((OwnLoss, "OwnLoss"), (dict, "Trainer")):
        with pytest.raises(InputError, match=message):
            with_descent(kind)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"taps": [2]}, "layers must be an integer >= 1, got 0"),
        ({"constraints": DescentConstraints(7)}, "layers = 7; expected 2"),
        ({"constraints": 0.1}, "DescentConstraints"),
        ({"constraints": {"dual_rl": 0.1}}, r"have no option 'dual_rl'; did you mean 'dual_lr'\?"),
        ({"unconstrained_steps": -1}, "unconstrained_steps must be an integer >= 0, got -1"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"compute_loss_func": lambda *args, **kwargs: None}, "compute_loss_func"),
    ]
    model = language_model()
    for changes, message in cases:
        with pytest.raises(InputError, match=message):
            trainer_for(tmp_path, model=model, **changes)
    assert trainer_for(tmp_path, {"preset": "lm"}, model=model).constraints.options.reference_mode == "anchor"
    data = [{name: value for name, value in row.items() if name != "labels"} for row in rows(4)]
    with pytest.raises(InputError, match="labels"):
        trainer_for(tmp_path, train_dataset=data).train()
