"""DescentCallback against the loop written out, its checkpoint, its validation and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cdt_fast import DescentCallback, DescentConstraints, InputError
from tests.integrations.integration_cases import (
    ASCENT,
    LEARNING_RATE,
    LIGHTNING,
    RATE,
    assert_same_weights,
    eager_losses,
    expected_run,
    language_model,
    rows,
    stacked,
)
from tests.runs import flat

lightning: Any = pytest.importorskip("lightning", reason="the package 'lightning' is not installed")


class Module(lightning.LightningModule):
    """A module whose training step is `loss_of` its model and a batch."""

    def __init__(self, loss_of: Any = lambda model, batch: model(**batch).loss, **settings: Any) -> None:
        super().__init__()
        self.model = language_model()
        self.loss_of, self.settings = loss_of, settings

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(self.model, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        if self.settings.get("adam"):
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, fused=self.settings.get("fused", False))


class Added(Module):
    """Trains on one row, with a term beside the model's loss whose gradient is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.added, self.gradients = torch.nn.Parameter(torch.zeros(())), list[float]()
        self.model.eval()  # as `from_pretrained` returns it

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(stacked(rows(1)), batch_idx) + self.added

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.added.grad is not None
        self.gradients.append(self.added.grad.item())


class History(lightning.Callback):
    def __init__(self, descent: Any) -> None:
        self.descent = descent
        self.multipliers: list[torch.Tensor] = []
        self.logged: list[list[float]] = []
        self.slacks: list[bool] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.slacks.append(bool(self.descent.constraints.slacks.any()))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.multipliers.append(self.descent.constraints.multipliers.clone())
        self.logged.append([float(trainer.logged_metrics.get(f"layer_loss_{depth}", 0)) for depth in range(3)])


def loader(data: Any) -> Any:
    return torch.utils.data.DataLoader(data, batch_size=1)


def fit(
    folder: Path, descent: Any, module: Any, count: int = 5, epochs: int = 2, validate: bool = False, **changes: Any
) -> tuple[Any, History]:
    resume, data = changes.pop("ckpt_path", None), changes.pop("data", rows(count))
    history = History(descent)
    own = {"max_epochs": epochs, "default_root_dir": folder, "callbacks": [descent, history]}
    trainer = lightning.Trainer(**{**LIGHTNING, **own, **changes})
    trainer.fit(module, loader(data), loader(rows(3)) if validate else None, ckpt_path=resume)
    return trainer, history


@pytest.mark.parametrize("items", [{}, {"num_items_in_batch": 100}])
def test_it_is_the_loop_written_out(tmp_path: Path, items: dict[str, int]) -> None:
    # Five rows: the last step of an epoch has one micro-batch where the others have two.
    descent, module = DescentCallback(ASCENT), Module(lambda model, batch: model(**batch, **items).loss)
    _, history = fit(tmp_path, descent, module)
    multipliers, losses, weights = expected_run([[0, 1], [2, 3], [4]] * 2, count=5)
    stepped = [1, 3, 4, 6, 8, 9]
    torch.testing.assert_close(torch.stack(history.multipliers)[stepped], multipliers, rtol=0, atol=1e-7)
    torch.testing.assert_close(torch.tensor(history.logged)[stepped].double(), losses, rtol=0, atol=1e-5)
    assert_same_weights(module.model, weights)


def test_a_trainer_that_never_logs(tmp_path: Path) -> None:
    trainer, history = fit(tmp_path, DescentCallback(ASCENT), Module(), log_every_n_steps=0)
    assert history.multipliers[-1].any()
    assert not trainer.logged_metrics


def test_gradients_are_clipped_after_they_are_set_right(tmp_path: Path) -> None:
    clip = 0.1
    module = Module()
    fit(tmp_path, DescentCallback(ASCENT), module, count=2, epochs=1, gradient_clip_val=clip)
    model = language_model()
    eager_losses(model, stacked(rows(2)))[-1].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LEARNING_RATE * parameter.grad
    assert_same_weights(module.model, dict(model.named_parameters()))


def test_slacks_restart_each_epoch_and_the_model_is_given_back(tmp_path: Path) -> None:
    descent, module = DescentCallback(DescentConstraints(2, RATE, dual_lr=0.1)), Module()
    _, history = fit(tmp_path, descent, module, count=3, accumulate_grad_batches=1)
    assert history.slacks == [False, False, True, False, True, True]  # λ moves first, then u
    assert "layer_losses" not in module.model(**stacked(rows(1)))
    with pytest.raises(InputError, match="while the trainer runs"):
        _ = descent.layer_losses


def test_rows_without_a_label_count_as_zero(tmp_path: Path) -> None:
    (row,) = rows(1)
    empty = {**row, "labels": torch.full_like(row["labels"], -100)}
    found = []
    for data in ([row, empty], [row]):
        module = Module()
        trainer, _ = fit(tmp_path, DescentCallback(ASCENT), module, epochs=1, validate=True, data=data)
        found.append((dict(module.model.named_parameters()), trainer.callback_metrics["layer_loss_2"]))
    assert_same_weights(module.model, found[0][0])
    assert found[0][1] == found[1][1]


class Skips(Module):
    """A module whose training step returns None for some batches, maybe after it has looked at their loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx not in self.settings["skipped"]:
            return super().training_step(batch, batch_idx)
        if self.settings["looks"]:
            super().training_step(batch, batch_idx)
        return None


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize(
    ("skipped", "steps"), [({2, 3}, [[0, 1], [4, 5]]), ({0, 1, 2}, [[3], [4, 5]]), ({5}, [[0, 1], [2, 3], [4]])]
)
def test_a_skipped_batch_is_as_if_it_were_not_there(
    skipped: set[int], steps: list[list[int]], looks: bool, tmp_path: Path
) -> None:
    descent, module = DescentCallback(ASCENT), Skips(skipped=skipped, looks=looks)
    trainer, _ = fit(tmp_path, descent, module, count=6)
    multipliers, losses, weights = expected_run(steps * 2, count=6)
    torch.testing.assert_close(descent.constraints.multipliers, multipliers[-1], rtol=0, atol=1e-7)
    logged = torch.tensor([float(trainer.logged_metrics[f"layer_loss_{depth}"]) for depth in range(3)])
    torch.testing.assert_close(logged.double(), losses[-1], rtol=0, atol=1e-5)
    assert_same_weights(module.model, weights)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_gradient_scaler_skips_moves_no_multiplier(fused: bool, tmp_path: Path) -> None:
    # The first scale is too large for any loss, those after it for none.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-127)
    precision = lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    descent, module = DescentCallback(ASCENT), Module(fused=fused)
    _, history = fit(tmp_path, descent, module, count=4, plugins=[precision])
    assert not history.multipliers[1].any()
    multipliers, _, weights = expected_run([[2, 3], [0, 1], [2, 3]], count=4)
    torch.testing.assert_close(descent.constraints.multipliers, multipliers[-1], rtol=0, atol=1e-3)
    assert_same_weights(module.model, weights, tolerance=1e-3)


class Explains(Module):
    """A module whose validation takes gradients."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            loss = self.model(**batch).loss
            torch.autograd.grad(loss, list(self.parameters()))
        self.log("val_loss", loss.detach())


@pytest.mark.parametrize("kind", [Module, Explains])
def test_validation_is_plain(kind: type[Module], tmp_path: Path) -> None:
    module = kind()
    changes = {"inference_mode": False, "val_check_interval": 1}  # within a step too
    trainer, _ = fit(tmp_path, DescentCallback(ASCENT), module, count=4, epochs=1, validate=True, **changes)
    assert_same_weights(module.model, expected_run([[0, 1], [2, 3]], count=4)[2])
    module.model.eval()
    with torch.no_grad():
        plain = sum(eager_losses(module.model, stacked([row]))[-1] for row in rows(3)) / 3
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(float(plain), abs=1e-5)


class Looks(Module):
    """A module that looks at a loss before training and after an epoch, which it ends by a hook."""

    def on_train_start(self) -> None:
        self.found, self.batch = [], stacked(rows(3))
        self.model(**self.batch)
        assert not self.trainer.callbacks[0].state_dict()  # nor has this rank waited for others

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None

    def on_train_epoch_end(self) -> None:
        own = eager_losses(self.model, self.batch)[-1].item()
        # First as a wrapper's inner model is called: without the hooks of the wrapper.
        self.found += [(call(**self.batch).loss.item(), own) for call in (self.model.forward, self.model)]


def test_a_look_at_the_model_between_batches_is_plain(tmp_path: Path) -> None:
    module = Looks()
    fit(tmp_path, DescentCallback(ASCENT), module)
    for loss, own in module.found:
        assert loss == pytest.approx(own, rel=1e-6)


class Finds(lightning.pytorch.callbacks.LearningRateFinder):
    """Looks for a learning rate before each epoch, too shortly to find one."""

    def on_fit_start(self, *args: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.lr_find(trainer, pl_module)


def test_a_learning_rate_finder_moves_nothing(tmp_path: Path) -> None:
    module, descent = Module(), DescentCallback(ASCENT)
    module.lr = LEARNING_RATE
    finder = Finds(num_training_steps=2, early_stop_threshold=None)
    fit(tmp_path, descent, module, count=4, callbacks=[descent, finder])
    multipliers, _, weights = expected_run([[0, 1], [2, 3]] * 2, count=4)
    torch.testing.assert_close(descent.constraints.multipliers, multipliers[-1], rtol=0, atol=1e-7)
    assert_same_weights(module.model, weights)


def test_steps_of_fewer_micro_batches_leave_other_terms_as_they_are(tmp_path: Path) -> None:
    module = Added()
    fit(tmp_path, DescentCallback(ASCENT), module, epochs=3)
    assert module.gradients == pytest.approx([1.0] * 9)


class RestoresLate(lightning.pytorch.strategies.SingleDeviceStrategy):
    """Restores a checkpoint after `on_fit_start`, as FSDP and ModelParallelStrategy do."""

    restore_checkpoint_after_setup = True


@pytest.mark.parametrize("late", [False, True])
def test_resume_is_bit_equal(late: bool, tmp_path: Path) -> None:
    settings = {"rate": RATE, "reference": 3.0, "dual_lr": 0.1, "slack_cost": 1.0}
    whole, module = DescentCallback(settings, unconstrained_steps=2), Module(adam=True)
    fit(tmp_path, whole, module, epochs=3)
    first = DescentCallback(settings, unconstrained_steps=2)
    trainer, _ = fit(tmp_path, first, Module(adam=True), epochs=2)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    resumed, again = DescentCallback(settings, unconstrained_steps=2), Module(adam=True)
    changes = {"strategy": RestoresLate("cpu")} if late else {}
    fit(tmp_path, resumed, again, epochs=3, ckpt_path=tmp_path / "saved.ckpt", **changes)
    assert flat(resumed.constraints.state_dict()) == flat(whole.constraints.state_dict())
    for mine, other in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, other)
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["callbacks"]["DescentCallback"]
    assert saved["items"] > 0


def test_a_checkpoint_that_is_only_tested_is_not_resumed_from(tmp_path: Path) -> None:
    descent, module = DescentCallback(ASCENT), Module()
    trainer, _ = fit(tmp_path, descent, module, epochs=1)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    trainer, _ = fit(tmp_path, descent, module, epochs=1)
    before = descent.constraints.multipliers.clone()
    trainer.validate(module, loader(rows(1)), ckpt_path=tmp_path / "saved.ckpt", weights_only=False)
    _, history = fit(tmp_path, descent, module, count=2, epochs=1)
    assert torch.equal(history.multipliers[0], before)


class Keeps(Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = inner


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"save_hyperparameters\(ignore=\['inner'\]\)"):
        fit(tmp_path, DescentCallback(ASCENT), Keeps(language_model()))
    manual = Module()
    manual.automatic_optimization = False
    for descent, module, message in (
        (DescentCallback(ASCENT, model="network"), Module(), r"model must name.*\['model'\]"),
        (DescentCallback(DescentConstraints(7)), Module(), "layers = 7; expected 2"),
        (DescentCallback(ASCENT), manual, "automatic"),
    ):
        with pytest.raises(InputError, match=message):
            fit(tmp_path, descent, module, accumulate_grad_batches=1)
    with pytest.raises(InputError, match=r"by ddp_spawn .* end with it\); there is no model before"):
        _ = DescentCallback(ASCENT).constraints


@pytest.mark.parametrize(
    ("loss_of", "message"),
    [
        (lambda model, batch: model(batch["input_ids"]).logits.mean(), "with labels=.* returned 1, .* 0 of the model"),
        (
            lambda model, batch: model(**batch).loss.detach() + next(model.parameters()).square().mean(),
            "training_step must return one loss of 'model'",
        ),
        (lambda model, batch: model(**batch).loss + model(**batch).loss, "it returned 1, in which there are 2"),
        (lambda model, batch: model(batch["input_ids"], *[None] * 4, batch["labels"]).loss, "called with labels="),
    ],
)
def test_what_is_not_one_loss_of_the_model_is_refused(loss_of: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        fit(tmp_path, DescentCallback(ASCENT), Module(loss_of), accumulate_grad_batches=1)
