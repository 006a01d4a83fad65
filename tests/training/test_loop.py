"""The loop on video: its steps, the model that it keeps, what it logs, and what it refuses to go on with."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cdt_fast.checks import InputError
from cdt_fast.models import DUST
from cdt_fast.training import loop
from cdt_fast.training import optimizer as optimizer_module
from cdt_fast.training.checkpoint import load_checkpoint
from cdt_fast.training.loop import Trainer
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.data import to_patches
from tests.runs import Config, evaluate_run, new_trainer, train

Make = Callable[..., Trainer]


@pytest.fixture
def make(tiny_config: Config, tmp_path: Path) -> Make:
    """A trainer of tiny settings with these changes, each in a folder of its own."""

    def trainer(**changes: Any) -> Trainer:
        config = tiny_config(**changes)
        return new_trainer(RunFolder.create(tmp_path / f"run {len(list(tmp_path.iterdir()))}", config), config)

    return trainer


# Twelve windows a step and 22 an epoch: every second step has ten, for batches of four as four, four and two.
# Patches of odd size: a generator that draws blocks would give a window other noise in other micro-batches.
ALIKE = {"size": 27, "patch": 3, "code_size": 9, "window": 2, "steps": 6, "reference": 1.0, "lr": 1e-3}


@pytest.mark.parametrize("constraints", [{}, {"constrained": False}, {"resilience": "decay"}])
def test_micro_batches_of_any_size_give_the_same_training(
    make: Make, in_float64: None, constraints: dict[str, Any]
) -> None:
    found = []
    for batch, accumulate in [(12, 1), (1, 12), (4, 3)]:
        trainer = make(**ALIKE, **constraints, batch=batch, accumulate=accumulate)
        trainer.run(progress=False)
        losses = [entry["loss"] for entry in trainer.folder.read_metrics() if "loss" in entry]
        duals = trainer.constraints.multipliers, trainer.constraints.slacks
        found.append([trainer.model.dictionary.detach(), *duals, torch.tensor(losses)])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-12)
    assert constraints or found[0][1].max() > 0, "the test shows nothing"


def test_a_step_is_that_of_one_batch_written_out(make: Make, in_float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, gradient, clipping, Adam and multipliers of the first steps, by hand, without the trainer's own pieces."""
    monkeypatch.setattr(optimizer_module, "LARGEST_GRADIENT_NORM", 0.25)
    duals = {"warmup_epochs": 0, "reference": 0.01, "resilience": "none", "betas": "none"}
    trainer = make(window=3, batch=2, accumulate=3, steps=3, **duals)
    model = DUST(64, 64, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    multipliers = torch.zeros(3)
    for step in range(3):
        clean, noisy = [], []
        for window, seed in (pair for micro_batch in trainer._micro_batches() for pair in micro_batch):
            clean.append(to_patches(trainer.data.train.batch([window]).to(torch.float64) / 255, 8, "time"))
            drawn = torch.randn(clean[-1].shape, generator=torch.Generator().manual_seed(seed))
            noisy.append(clean[-1] + 0.15 * trainer.data.sigma * drawn)
        target = torch.cat(clean)
        outputs = model.reconstructions(torch.cat(noisy))
        losses = torch.stack([(output - target).square().sum(-1).mean() for output in outputs])
        violation = torch.cat([losses[:1] - 0.01, losses[1:] - 0.7 * losses[:-1]])
        optimizer.zero_grad()
        (losses[2] + torch.dot(multipliers, violation)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.param_groups[0]["lr"] = 0.01 * 0.5 * (1 + math.cos(math.pi * step / 3))
        optimizer.step()
        multipliers = (multipliers + 0.01 * violation.detach()).clamp(min=0)
        trainer._train_step()
        trainer.step += 1
        torch.testing.assert_close(trainer.constraints.multipliers, multipliers, rtol=0, atol=1e-12)
        torch.testing.assert_close(trainer.model.dictionary, model.dictionary, rtol=0, atol=1e-10)
    assert multipliers[0] > 0


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_gradients_are_clipped_by_their_exact_norm(size: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((5, 256, 1024), (7,), ())]
    generator = torch.Generator().manual_seed(0)
    given = [size * 1e-3 * torch.randn(each.shape, generator=generator) for each in parameters]
    for parameter, gradient in zip(parameters, given, strict=True):
        parameter.grad = gradient.clone()
    optimizer_module._clip_gradients(parameters)
    norm = torch.cat([each.double().flatten() for each in given]).norm()
    for parameter, gradient in zip(parameters, given, strict=True):
        expected = gradient.double() * (1 / norm.clamp(min=1.0))
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=3e-6, atol=0.0)
    optimizer_module._clip_gradients([])


def test_an_epoch_sees_every_window_once_in_a_new_order_with_new_noise(make: Make) -> None:
    seeds, orders = [], []
    for seed in (0, 1):
        trainer = make(seed=seed, window=2, batch=4, accumulate=2)
        for epoch in range(3):
            pairs = []
            for step in range(trainer.steps_per_epoch):
                trainer.step = epoch * trainer.steps_per_epoch + step
                pairs += [pair for micro_batch in trainer._micro_batches() for pair in micro_batch]
            orders.append([window for window, _ in pairs])
            seeds += [number for _, number in pairs]
            assert sorted(orders[-1]) == list(range(len(trainer.data.train)))
    assert len(set(map(tuple, orders))) == 6
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(("schedule", "middle"), [("constant", [1, 1]), ("linear", [0.5, 0]), ("cosine", [0.5, 0])])
def test_the_learning_rate_follows_its_schedule(make: Make, schedule: str, middle: list[float]) -> None:
    trainer, rates = make(schedule=schedule, steps=6), []
    for trainer.step in (0, 3, 6):
        rates.append(trainer._rate() / trainer.workload.lr)
    assert rates == pytest.approx([1, *middle], abs=1e-6)


def test_the_slacks_start_anew_with_every_epoch(make: Make) -> None:
    trainer, largest = make(rate=0.99, batch=2, warmup_epochs=0), []
    assert trainer.steps_per_epoch == 4
    for _ in range(12):
        trainer._train_step()
        trainer.step += 1
        largest.append(trainer.constraints.slacks.max().item())
    assert not any(largest[3::4])
    assert all(value > 0 for index, value in enumerate(largest) if index % 4 in (1, 2))


# What validation says of each depth, step by step from the untrained network on, and of which step the model is kept.
TOLD: list[tuple[dict[str, Any], list[tuple[list[float], int]]]] = [
    (
        {"reference": 2.0, "warmup_epochs": 0},
        [
            ([1.0, 1.0, 1.0], 0),
            ([1.0, 0.9, 0.2], 1),  # infeasible: 0.9 > 0.7 · 1, at a price of 10/2 · 0.2²
            ([1.0, 0.8, 0.3], 2),  # less so, with a higher loss: better
            ([1.0, 0.6, 0.4], 2),  # feasible, with a loss that is higher than loss and price: not kept
            ([1.0, 0.6, 0.34], 4),  # with one that is lower: better
            ([1.0, 0.8, 0.1], 5),  # infeasible with a loss so low that it is worth it: better
            ([1.0, 0.5, 0.16], 5),  # feasible, not kept
        ],
    ),
    (
        # A small Llama under bounds that nothing met: its least violated model was its least trained.
        {"layers": 4, "rate": 0.05, "reference": 12.0, "normalize": True},
        [([8.3] * 5, 0), ([7.40, 6.59, 6.14, 5.96, 5.86], 1), ([7.15, 5.73, 5.30, 5.23, 5.21], 2)],
    ),
    (
        # Raw violations, of which a network that does nothing has the least; it is left for one that learned.
        {"rate": 0.05, "reference": 5.9, "reference_mode": "anchor"},
        [([5.90, 5.97, 5.97], 0), ([5.72, 7.0, 3.05], 1), ([5.72, 6.9, 6.2], 1)],
    ),
]


@pytest.mark.parametrize(("changes", "told"), TOLD)
def test_the_model_of_the_lowest_merit_is_kept(
    make: Make, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], told: list[tuple[list[float], int]]
) -> None:
    trainer = make(steps=len(told) - 1, validate_every=1, slack_cost=10.0, **changes)
    losses = iter(told)
    monkeypatch.setattr(trainer.workload, "validation_losses", lambda _: next(losses)[0])
    monkeypatch.setattr(trainer.workload, "validation_error", lambda _: None)
    weights, original = [trainer.model.dictionary.detach().clone()], trainer._save_checkpoint

    def after_validation() -> None:
        weights.append(trainer.model.dictionary.detach().clone())
        best = told[trainer.step][1]
        assert trainer.best is not None
        assert trainer.best["step"] == best
        assert torch.equal(DUST.from_pretrained(trainer.folder.model).dictionary, weights[best])
        original()

    monkeypatch.setattr(trainer, "_save_checkpoint", after_validation)
    trainer.run(progress=False)
    assert len(weights) == len(told)


@pytest.mark.parametrize(
    ("constrained", "told", "best"),
    [
        # Feasible at every step; then never; then at the second and third; then worse than untrained, feasible or not.
        (True, [(3.0, 9.0), (3.0, 8.0), (3.0, 8.5)], 1),
        (True, [(3.0, 9.0), (7.0, 8.0), (7.0, 7.0)], 2),
        (True, [(7.0, 9.5), (3.0, 9.0), (3.0, 8.0), (7.0, 7.0)], 2),
        (True, [(7.0, 5.0), (3.0, 9.0), (3.0, 8.0), (7.0, 7.0)], 0),
        (True, [(3.0, 5.0), (3.0, 9.0), (7.0, 7.0)], 0),
        (True, [(3.0, 9.0), (7.0, 8.0), (3.0, 8.5)], 2),
        (False, [(3.0, 9.0), (7.0, 8.0), (3.0, 8.5)], 1),
    ],
)
def test_the_feasible_model_of_the_lowest_error_is_kept(
    make: Make, monkeypatch: pytest.MonkeyPatch, constrained: bool, told: list[tuple[float, float]], best: int
) -> None:
    """Where the evaluation is of more than the training noise."""
    changes = {"rate": 0.01, "reference": 6.0, "warmup_epochs": 0} if constrained else {"constrained": False}
    trainer = make(steps=len(told) - 1, validate_every=1, **changes)
    losses, errors = iter([6.0, (6.0 + last) / 2, last] for last, _ in told), iter(error for _, error in told)
    monkeypatch.setattr(trainer.workload, "validation_losses", lambda _: next(losses))
    monkeypatch.setattr(trainer.workload, "validation_error", lambda _: next(errors))
    trainer.run(progress=False)
    assert trainer.best is not None
    assert trainer.best["step"] == best


def test_models_are_compared_by_the_reference_of_now(make: Make) -> None:
    trainer = make(rate=0.01, reference=6.0)
    before = {"step": 5, "loss": [6.0, 9.0, 3.0], "feasible": True, "error": 20.0}  # when it was not known
    assert trainer._is_better({"loss": [6.0, 8.0, 2.0], "feasible": False, "error": 10.0}, before)


def test_an_error_at_other_noise_says_nothing_of_the_model_that_is_kept(make: Make) -> None:
    trainer = make(steps=2, validate_every=1)
    trainer.run(progress=False)
    state = load_checkpoint(trainer.folder.checkpoint)
    for gammas, known in ((trainer.settings.evaluation.gammas, True), ([2.0], False)):
        again = make(steps=2, validate_every=1, gammas=gammas)
        again.load(state)
        assert again.best is not None
        assert ("error" in again.best) is known


@pytest.mark.parametrize("changes", [{}, {"constrained": False}, {"warmup_epochs": 0, "reference": 1.0}])
def test_a_training_that_makes_things_worse_keeps_the_untrained_network(make: Make, changes: dict[str, Any]) -> None:
    trainer = make(steps=4, validate_every=2, lr=0.3, **changes)
    untrained = trainer.model.dictionary.detach().clone()
    trainer.run(progress=False)
    assert trainer.best is not None
    assert trainer.best["step"] == 0
    assert torch.equal(DUST.from_pretrained(trainer.folder.model).dictionary, untrained)
    evaluated = evaluate_run(trainer.folder, trainer.settings).evaluation
    assert evaluated.success is False
    assert evaluated.verdict.startswith("no success: training gained nothing")
    assert evaluated.untrained_loss == evaluated.kept_loss


@pytest.mark.parametrize(
    ("losses", "guess", "said"),
    [
        ([0.300, 0.302, 0.314], None, ""),  # a fresh ViT
        ([30.0, 20.0, 45.0], None, "loss at the last depth is 45 where that of its input is 30; change"),
        ([0.1, 0.2, 0.7], math.log(2), ""),  # its input is read well, and it guesses
        ([3.0, 3.0, 9.0], math.log(40), "loss at the last depth is 9 where that of its input is 3; change"),
        ([30.0, 20.0, 480.0], None, InputError),
        ([1.0, 1.0, math.nan], math.log(40), InputError),
        ([1.0, math.inf, 1.0], None, InputError),
    ],
)
def test_a_start_that_is_worse_than_its_input_is_said_or_refused(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    losses: list[float],
    guess: float | None,
    said: str | type[InputError],
) -> None:
    trainer = make(steps=1)
    monkeypatch.setattr(trainer.workload, "guess_loss", guess)
    monkeypatch.setattr(trainer.workload, "validation_losses", lambda _: losses)
    if not isinstance(said, str):
        with pytest.raises(InputError, match=r"the untrained network's .*; change what differs from the defaults: "):
            trainer.run(progress=False)
        trainer.folder.remove_if_untouched()
        assert not trainer.folder.path.exists()
        return
    trainer.run()
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == bool(said)
    assert all(said in line and "[model] code_size 64" in line and "[data] size 32" in line for line in warnings)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"steps": 21}, None),
        ({"steps": 3}, "the constraints come on after a warm-up of 4 steps"),
        ({"steps": 6, "reference": 1.0}, None),
        ({"steps": 5, "reference": 1.0}, "the constraints come on after a warm-up of 4 steps"),
        ({"steps": 5, "constrained": False}, None),
        ({"steps": 5, "rate": "none", "reference_mode": "anchor"}, "there are no constraints: --rate is none"),
        ({"steps": 5, "rate": "none", "reference": "none", "bounds": {1: 0.5}, "warmup_epochs": 0}, None),
    ],
)
def test_constraints_that_never_come_on_are_said_before_the_training(
    make: Make, changes: dict[str, Any], note: str | None
) -> None:
    said = [line for line in make(**changes).notes() if line.startswith("note:")]
    assert len(said) == (note is not None)
    assert note is None or note in said[0]


@pytest.mark.parametrize("broken", ["weights", "rate"])
def test_losses_that_are_not_finite_end_the_run_and_keep_what_was_good(make: Make, broken: str) -> None:
    trainer = make(steps=40, validate_every=1, lr=0.01 if broken == "weights" else 1e30)
    step = trainer._train_step

    def break_at_step_five() -> None:
        if broken == "weights" and trainer.step == 4:
            trainer.model.dictionary.data.mul_(1e30)
        step()

    trainer._train_step = break_at_step_five  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"no longer finite at step \d.*lower --lr") as caught:
        trainer.run(progress=False)
    assert "\n" not in str(caught.value)
    assert DUST.from_pretrained(trainer.folder.model).dictionary.isfinite().all()
    assert "nan" not in str(trainer.folder.read_metrics())
    if broken == "weights":
        state = load_checkpoint(trainer.folder.checkpoint)
        assert "at step 5; the checkpoint is from before and is kept" in str(caught.value)
        assert state["step"] == 4
        assert state["model"]["dictionary"].isfinite().all()


def test_metrics_hold_the_means_since_the_line_before(
    make: Make, in_float64: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {}
    for every in (1, 3):
        monkeypatch.setattr(loop, "LOG_EVERY", every)
        trainer = make(steps=7, batch=4, validate_every=4, warmup_epochs=0)
        trainer.run(progress=False)
        entries = trainer.folder.read_metrics()
        assert [entry["step"] for entry in entries if "validation" in entry] == [0, 4, 7]
        lines[every] = [entry for entry in entries if "loss" in entry]
    assert [entry["step"] for entry in lines[3]] == [3, 6, 7]
    for number, entry in enumerate(lines[3]):
        single = [line["loss"] for line in lines[1][3 * number : 3 * number + 3]]
        assert entry["loss"] == pytest.approx([sum(depth) / len(single) for depth in zip(*single, strict=True)])
        assert len(entry["weights"]) == len(entry["multipliers"]) == len(entry["slacks"]) == 3
        assert entry["windows_per_second"] > 0
    assert lines[3][0]["epoch"] == 3 / trainer.steps_per_epoch
    assert lines[3][-1]["multipliers"] == trainer.constraints.multipliers.tolist()


def test_progress_outside_of_a_terminal_is_a_line_a_validation(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make(steps=4, validate_every=2)
    train(trainer.folder, trainer.settings, progress=True)
    shown = capsys.readouterr().err
    assert "\r" not in shown
    assert "windows of 5 frames: 8 training, 1 validation, 1 test" in shown
    assert [line.split(":")[0] for line in shown.splitlines()[-2:]] == ["step 2 of 4", "step 4 of 4"]
    trainer = make(steps=1)
    train(trainer.folder, trainer.settings, progress=False)
    assert capsys.readouterr().err == ""


def test_a_print_that_fails_leaves_model_and_checkpoint_of_one_step(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(steps=4, validate_every=2)

    def fail(*_: Any, **options: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(loop, "print", fail, raising=False)
    with pytest.raises(BrokenPipeError):
        trainer.run(progress=True)
    assert load_checkpoint(trainer.folder.checkpoint)["step"] == 2


def test_bf16_trains_and_keeps_its_weights_in_float32(make: Make) -> None:
    losses = []
    for precision in ("bf16", "fp32"):
        trainer = make(precision=precision, steps=2)
        trainer.run(progress=False)
        assert trainer.model.dictionary.dtype == torch.float32
        losses.append(trainer.folder.read_metrics()[1]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0] != losses[1]
