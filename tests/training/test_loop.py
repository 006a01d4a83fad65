from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cdt_fast.errors import InputError
from cdt_fast.models import DUST
from cdt_fast.training import loop
from cdt_fast.training import optimizer as optimizer_module
from cdt_fast.training.checkpoint import load_checkpoint
from cdt_fast.training.loop import Trainer
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.data import to_patches
from cdt_fast.video.settings import VideoSettings
from tests.runs import evaluate_run, new_trainer, train
from tests.training.training_cases import run_on_two_ranks

Config = Callable[..., VideoSettings]


def trainer_for(config: VideoSettings, folder: Path) -> Trainer:
    run = RunFolder.create(folder, config)
    return new_trainer(run, config)


@pytest.fixture
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


# Twelve windows a step and eighteen an epoch: every second step has six, for batches of four as four and two.
# Patches of odd size: a generator that draws blocks would give a window other noise in other micro-batches.
STEPS_ALIKE = {
    "size": 27,
    "patch": 3,
    "code_size": 9,
    "stride": 2,
    "steps": 6,
    "reference": 1.0,
    "lr": 1e-3,
}


@pytest.mark.parametrize("constraints", [{}, {"constrained": False}, {"resilience": "decay"}])
def test_micro_batches_of_any_size_give_the_same_training(
    tiny_config: Config, tmp_path: Path, in_float64: None, constraints: dict[str, Any]
) -> None:
    trainers = []
    for batch, accumulate in [(12, 1), (1, 12), (4, 3), (6, 2)]:
        config = tiny_config(**STEPS_ALIKE, **constraints, batch=batch, accumulate=accumulate)
        trainer = trainer_for(config, tmp_path / str(len(trainers)))
        assert trainer.model.dictionary.dtype == torch.float64
        trainer.run(progress=False)
        trainers.append(trainer)
    reference = trainers[0]
    for trainer in trainers[1:]:
        torch.testing.assert_close(trainer.model.dictionary, reference.model.dictionary, rtol=0, atol=1e-12)
        for name in ("multipliers", "slacks"):
            here, there = getattr(trainer.constraints, name), getattr(reference.constraints, name)
            torch.testing.assert_close(here, there, rtol=0, atol=1e-12)
        for entry, expected in zip(trainer.folder.read_metrics(), reference.folder.read_metrics(), strict=True):
            if "loss" in entry:
                assert entry["loss"] == pytest.approx(expected["loss"], rel=0, abs=1e-12)
    if not constraints:
        assert reference.constraints.multipliers.max() > 0  # or the test shows nothing
        assert (reference.constraints.slacks >= 0).all()


def test_a_step_is_that_of_one_batch_written_out(
    tiny_config: Config, tmp_path: Path, in_float64: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, gradient, clipping, Adam and multipliers of the first steps, by hand, without the trainer's own pieces."""
    monkeypatch.setattr(optimizer_module, "LARGEST_GRADIENT_NORM", 0.25)
    config = tiny_config(stride=3, batch=2, accumulate=3, steps=3, warmup_epochs=0, reference=0.01)
    config.constraints.resilience, config.constraints.betas = "none", None
    trainer = trainer_for(config, tmp_path / "run")
    model = DUST(64, 64, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    multipliers = torch.zeros(3)
    for step in range(3):
        chosen = [pair for micro_batch in trainer._micro_batches() for pair in micro_batch]
        noise = torch.Generator()
        clean, noisy = [], []
        for window, seed in chosen:
            frames = trainer.data.train.batch([window]).to(torch.float64) / 255
            clean.append(to_patches(frames, 8, "time"))
            drawn = torch.randn(clean[-1].shape, generator=noise.manual_seed(seed))
            noisy.append(clean[-1] + 0.15 * trainer.data.sigma * drawn)
        target = torch.cat(clean)
        outputs = model.reconstructions(torch.cat(noisy))
        losses = torch.stack([(output - target).square().sum(-1).mean() for output in outputs])
        lagrangian = losses[2] + multipliers[0] * (losses[0] - 0.01)
        lagrangian = lagrangian + sum(
            multipliers[depth] * (losses[depth] - 0.7 * losses[depth - 1]) for depth in (1, 2)
        )
        optimizer.zero_grad()
        lagrangian.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.param_groups[0]["lr"] = 0.01 * 0.5 * (1 + math.cos(math.pi * step / 3))
        optimizer.step()
        violation = torch.stack([losses[0] - 0.01, losses[1] - 0.7 * losses[0], losses[2] - 0.7 * losses[1]]).detach()
        multipliers = (multipliers + 0.01 * violation).clamp(min=0)
        trainer._train_step()
        trainer.step += 1
        torch.testing.assert_close(trainer.constraints.multipliers, multipliers, rtol=0, atol=1e-12)
        torch.testing.assert_close(trainer.model.dictionary, model.dictionary, rtol=0, atol=1e-10)
    assert multipliers[0] > 0


def test_every_window_has_new_noise_in_every_epoch_and_run(tiny_config: Config, tmp_path: Path) -> None:
    seeds = []
    for seed in (0, 1):
        trainer = trainer_for(tiny_config(seed=seed, batch=3), tmp_path / str(seed))
        for step in range(3 * trainer.steps_per_epoch):
            trainer.step = step
            seeds += [pair[1] for micro_batch in trainer._micro_batches() for pair in micro_batch]
    assert len(set(seeds)) == len(seeds) == 2 * 3 * len(trainer.data.train)


def test_an_epoch_sees_every_window_once_in_a_new_order(tiny_config: Config, tmp_path: Path) -> None:
    trainer = trainer_for(tiny_config(stride=2, batch=4, accumulate=2), tmp_path / "run")
    orders = []
    for epoch in range(2):
        order = []
        for step in range(trainer.steps_per_epoch):
            trainer.step = epoch * trainer.steps_per_epoch + step
            order += [window for micro_batch in trainer._micro_batches() for window, _ in micro_batch]
        assert sorted(order) == list(range(len(trainer.data.train)))
        orders.append(order)
    assert orders[0] != orders[1]


@pytest.mark.parametrize(
    ("schedule", "expected"), [("constant", [1, 1, 1]), ("linear", [1, 0.5, 0]), ("cosine", [1, 0.5, 0])]
)
def test_the_learning_rate_follows_its_schedule(
    tiny_config: Config, tmp_path: Path, schedule: str, expected: list[float]
) -> None:
    trainer = trainer_for(tiny_config(schedule=schedule, steps=6), tmp_path / "run")
    assert [trainer._relative_rate(step) for step in (0, 3, 6)] == pytest.approx(expected, abs=1e-6)


def test_the_slacks_start_anew_with_every_epoch(tiny_config: Config, tmp_path: Path) -> None:
    trainer = trainer_for(tiny_config(rate=0.99, batch=2, warmup_epochs=0), tmp_path / "run")
    assert trainer.steps_per_epoch == 4
    largest = []
    for _ in range(12):
        trainer._train_step()
        trainer.step += 1
        largest.append(trainer.constraints.slacks.max().item())
    assert all(value == 0 for value in largest[3::4])
    assert all(value > 0 for index, value in enumerate(largest) if index % 4 in (1, 2))


def test_the_model_of_the_lowest_merit_is_kept(
    tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation says, step by step, what a model is worth; the weights in `model/` must be those of the best."""
    told = [
        ([1.0, 0.9, 0.2], 1),  # infeasible: 0.9 > 0.7 · 1, at a price of 10/2 · 0.2²
        ([1.0, 0.8, 0.3], 2),  # less so, with a higher loss: better
        ([1.0, 0.6, 0.4], 2),  # feasible, with a loss that is higher than loss and price: not kept
        ([1.0, 0.6, 0.34], 4),  # with one that is lower: better
        ([1.0, 0.8, 0.1], 5),  # infeasible with a loss so low that it is worth it: better
        ([1.0, 0.5, 0.16], 5),  # feasible, not kept
    ]
    config = tiny_config(steps=6, validate_every=1, warmup_epochs=0, reference=2.0, slack_cost=10.0)
    trainer = trainer_for(config, tmp_path / "run")
    losses = iter([([1.0, 1.0, 1.0], 0), *told])
    monkeypatch.setattr(trainer.workload, "validation_losses", lambda _: next(losses)[0])
    weights = {}
    original = trainer._save_checkpoint

    def after_validation() -> None:
        weights[trainer.step] = trainer.model.dictionary.detach().clone()
        best = told[trainer.step - 1][1]
        assert trainer.best is not None
        assert trainer.best["step"] == best
        kept = DUST.from_pretrained(trainer.folder.model)
        assert torch.equal(kept.dictionary, weights[best])
        original()

    monkeypatch.setattr(trainer, "_save_checkpoint", after_validation)
    trainer.run(progress=False)
    validations = [entry["validation"] for entry in trainer.folder.read_metrics() if "validation" in entry]
    assert [entry["feasible"] for entry in validations[1:]] == [False, False, True, True, False, True]
    assert validations[1]["worst_layer"] == 1
    assert validations[1]["worst_violation"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("changes", "told", "kept"),
    [
        # A small Llama under bounds that nothing met: its least violated model was its least trained.
        (
            {"layers": 4, "rate": 0.05, "reference": 12.0, "normalize": True},
            [[8.3] * 5, [7.40, 6.59, 6.14, 5.96, 5.86], [7.15, 5.73, 5.30, 5.23, 5.21]],
            2,
        ),
        # Raw violations, of which a network that does nothing has the least; it is left for one that learned.
        (
            {"rate": 0.05, "reference": 5.9, "reference_mode": "anchor"},
            [[5.90, 5.97, 5.97], [5.72, 7.0, 3.05], [5.72, 6.9, 6.2]],
            1,
        ),
    ],
)
def test_a_model_that_learned_is_kept_over_one_that_violates_less(
    tiny_config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    told: list[list[float]],
    kept: int,
) -> None:
    trainer = trainer_for(tiny_config(steps=2, validate_every=1, slack_cost=10.0, **changes), tmp_path / "run")
    losses = iter(told)
    monkeypatch.setattr(trainer.workload, "validation_losses", lambda _: next(losses))
    trainer.run(progress=False)
    assert trainer.best is not None
    assert trainer.best["step"] == kept


@pytest.mark.parametrize("changes", [{}, {"constrained": False}, {"warmup_epochs": 0, "reference": 1.0}])
def test_a_training_that_makes_things_worse_keeps_the_untrained_network(
    tiny_config: Config, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = tiny_config(steps=4, validate_every=2, lr=0.3, **changes)
    trainer = trainer_for(config, tmp_path / "run")
    untrained = trainer.model.dictionary.detach().clone()
    trainer.run(progress=False)
    assert trainer.best is not None
    assert trainer.best["step"] == 0
    assert torch.equal(DUST.from_pretrained(trainer.folder.model).dictionary, untrained)
    evaluated = evaluate_run(trainer.folder, config).evaluation
    assert evaluated.success is False
    assert evaluated.verdict.startswith("No success: training gained nothing, and the untrained network was kept; ")
    first, *_, last = [entry["validation"] for entry in trainer.folder.read_metrics() if "validation" in entry]
    assert (evaluated.untrained_loss, evaluated.final_loss) == (first["loss"][-1], last["loss"][-1])


@pytest.mark.parametrize(
    ("losses", "guess", "said"),
    [
        ([30.0, 20.0, 29.0], None, ""),
        ([0.300, 0.302, 0.314], None, ""),  # a fresh ViT
        ([30.0, 20.0, 45.0], None, "loss at the last depth is 45 where that of its input is 30; change"),
        ([5.94, 5.98, 6.01], 5.9, ""),
        ([0.1, 0.2, 0.7], math.log(2), ""),  # its input is read well, and it guesses
        ([3.0, 3.0, 9.0], math.log(40), "loss at the last depth is 9 where that of its input is 3; change"),
        ([30.0, 20.0, 480.0], None, InputError),
        ([1.0, 1.0, math.nan], math.log(40), InputError),
        ([1.0, math.inf, 1.0], None, InputError),
    ],
)
def test_a_start_that_is_worse_than_its_input_is_said_or_refused(
    tiny_config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    losses: list[float],
    guess: float | None,
    said: str | type[InputError],
) -> None:
    trainer = trainer_for(tiny_config(steps=1), tmp_path / "run")
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
    ("changes", "notes"),
    [
        ({"steps": 21}, []),
        ({"steps": 20}, ["takes 20 steps, and the training ends at step 20"]),
        ({"steps": 3}, ["the constraints come on after a warm-up of 4 steps"]),
        ({"steps": 6, "reference": 1.0}, []),
        ({"steps": 5, "reference": 1.0}, ["the constraints come on after a warm-up of 4 steps"]),
        ({"steps": 6, "reference": "none"}, []),
        ({"steps": 5, "constrained": False}, []),
        ({"steps": 5, "rate": "none", "reference": "none"}, ["there are no constraints: --rate is none"]),
        ({"steps": 5, "rate": "none", "reference_mode": "anchor"}, ["there are no constraints: --rate is none"]),
        ({"steps": 5, "rate": "none", "reference": "none", "bounds": {1: 0.5}, "warmup_epochs": 0}, []),
    ],
)
def test_constraints_that_never_come_on_are_said_before_the_training(
    tiny_config: Config, tmp_path: Path, changes: dict[str, Any], notes: list[str]
) -> None:
    said = [line for line in trainer_for(tiny_config(**changes), tmp_path / "run").notes() if line.startswith("note:")]
    assert len(said) == len(notes)
    assert all(part in line for part, line in zip(notes, said, strict=True))


def test_losses_that_are_not_finite_end_the_run_and_keep_the_checkpoint(tiny_config: Config, tmp_path: Path) -> None:
    config = tiny_config(steps=40, validate_every=1)
    trainer = trainer_for(config, tmp_path / "run")
    step = trainer._train_step

    def break_at_step_five() -> None:
        if trainer.step == 4:
            trainer.model.dictionary.data.mul_(1e30)
        step()

    trainer._train_step = break_at_step_five  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"no longer finite at step 5.*checkpoint.*lower --lr") as caught:
        trainer.run(progress=False)
    assert "\n" not in str(caught.value)
    state = load_checkpoint(trainer.folder.checkpoint)
    assert state["step"] == 4
    assert state["model"]["dictionary"].isfinite().all()


def test_broken_losses_never_reach_the_kept_model(tiny_config: Config, tmp_path: Path) -> None:
    config = tiny_config(steps=40, lr=1e30, validate_every=1)
    trainer = trainer_for(config, tmp_path / "run")
    with pytest.raises(InputError, match="no longer finite"):
        trainer.run(progress=False)
    if trainer.folder.model.exists():
        assert DUST.from_pretrained(trainer.folder.model).dictionary.isfinite().all()
    assert "nan" not in str(trainer.folder.read_metrics())


def test_metrics_say_what_happened(tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOG_EVERY", 3)
    config = tiny_config(steps=7, validate_every=4, accumulate=2, warmup_epochs=0)
    trainer = trainer_for(config, tmp_path / "run")
    trainer.run(progress=False)
    logged = [entry for entry in trainer.folder.read_metrics() if "loss" in entry]
    validated = [entry for entry in trainer.folder.read_metrics() if "validation" in entry]
    assert [entry["step"] for entry in logged] == [3, 6, 7]
    assert [entry["step"] for entry in validated] == [0, 4, 7]
    assert logged[0]["epoch"] == 3 / trainer.steps_per_epoch
    for entry in logged:
        assert len(entry["loss"]) == len(entry["weights"]) == len(entry["multipliers"]) == len(entry["slacks"]) == 3
        assert entry["windows_per_second"] > 0
    assert logged[-1]["multipliers"] == trainer.constraints.multipliers.tolist()
    for line in trainer.folder.metrics.read_text().splitlines():
        json.loads(line)


def test_a_loss_in_the_metrics_is_the_mean_since_the_line_before(
    tiny_config: Config, tmp_path: Path, in_float64: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = trainer_for(tiny_config(batch=4), tmp_path / "each")
    third = trainer_for(tiny_config(batch=4), tmp_path / "third")
    for trainer, steps in ((each, 1), (third, 3)):
        monkeypatch.setattr(loop, "LOG_EVERY", steps)
        trainer.run(progress=False)
    single = [entry["loss"] for entry in each.folder.read_metrics() if "loss" in entry]
    means = [[sum(depth) / 3 for depth in zip(*single[start : start + 3], strict=True)] for start in (0, 3)]
    logged = [entry["loss"] for entry in third.folder.read_metrics() if "loss" in entry]
    assert [value for line in logged for value in line] == pytest.approx([value for line in means for value in line])


def test_progress_outside_of_a_terminal_is_a_line_a_validation(
    tiny_config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(steps=4, validate_every=2)
    train(RunFolder.create(tmp_path / "run", config), config, progress=True)
    shown = capsys.readouterr().err
    assert "\r" not in shown
    assert "windows of 5 frames: 8 training, 1 validation, 1 test" in shown
    assert [line.split(":")[0] for line in shown.splitlines()[-2:]] == ["step 2 of 4", "step 4 of 4"]
    train(RunFolder.create(tmp_path / "silent", config), config, progress=False)
    assert capsys.readouterr().err == ""


def test_bf16_trains_and_keeps_its_weights_in_float32(tiny_config: Config, tmp_path: Path) -> None:
    trainer = trainer_for(tiny_config(precision="bf16", steps=2), tmp_path / "bf16")
    plain = trainer_for(tiny_config(steps=2), tmp_path / "fp32")
    trainer.run(progress=False)
    plain.run(progress=False)
    assert trainer.model.dictionary.dtype == torch.float32
    first, second = (run.folder.read_metrics()[1]["loss"] for run in (trainer, plain))
    assert first == pytest.approx(second, rel=0.05)
    assert first != second


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_a_gpu_that_is_not_there_is_said_so(tiny_config: Config, tmp_path: Path) -> None:
    config = tiny_config(device="cuda")
    with pytest.raises(InputError, match="GPU"):
        train(RunFolder(tmp_path), config, progress=False)


_RANK = """
import sys
import torch
from pathlib import Path
from accelerate import Accelerator
torch.set_default_dtype(torch.float64)
from cdt_fast.video.settings import VideoSettings
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.loop import Trainer
from tests.runs import new_trainer
folder = Path(sys.argv[1])
config = VideoSettings.load(folder / "config.toml")
trainer = new_trainer(RunFolder(folder), config)
assert trainer.accelerator.num_processes == 2
trainer.run(progress=False)
"""


@pytest.mark.slow
def test_two_ranks_train_as_one(tiny_config: Config, tmp_path: Path, in_float64: None) -> None:
    """36 windows in steps of ten: the fourth ends with a micro-batch of one, in which one rank has nothing to do."""
    config = tiny_config(
        stride=1,
        batch=5,
        accumulate=2,
        steps=5,
        lr=1e-3,
        warmup_epochs=0,
        reference=1.0,
    )
    alone = trainer_for(config, tmp_path / "alone")
    assert len(alone.data.train) == 36
    alone.run(progress=False)
    together = RunFolder.create(tmp_path / "together", config)
    run_on_two_ranks(_RANK, together)
    state = load_checkpoint(together.checkpoint)
    torch.testing.assert_close(state["model"]["dictionary"], alone.model.dictionary.data, rtol=0, atol=1e-12)
    torch.testing.assert_close(state["constraints"]["duals.state"], alone.constraints.duals.state, rtol=0, atol=1e-12)
    for entry, expected in zip(together.read_metrics(), alone.folder.read_metrics(), strict=True):
        if "loss" in entry:
            assert entry["loss"] == pytest.approx(expected["loss"], rel=0, abs=1e-12)
