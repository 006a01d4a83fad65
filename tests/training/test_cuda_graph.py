"""Captured steps without a GPU: what is captured and replayed when, and that a replay is the step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast.training.checkpoint import load_checkpoint
from cdt_fast.training.cuda_graph import EAGER_CALLS, CapturedStep, CudaGraphs
from cdt_fast.training.loop import Trainer
from cdt_fast.training.optimizer import build_optimizer, load_optimizer_state, set_rate
from cdt_fast.training.run_folder import RunFolder
from tests.constraints.constraint_cases import NoHostSync
from tests.graph_fakes import EagerGraphs, TapeGraphs
from tests.runs import Config, assert_same_runs, flat, new_trainer


def test_every_shape_dtype_and_choice_runs_eagerly_then_is_captured_then_replayed() -> None:
    graphs, total, expected, calls = TapeGraphs(), torch.zeros(()), 0.0, 0
    step = CapturedStep(lambda x, *, factor, add: total.add_(x.sum() * factor) if add else total, graphs)
    for number in range(EAGER_CALLS + 4):
        for given in (torch.ones(2), torch.ones(3), torch.ones(3, dtype=torch.float64)):
            for factor, add in ((1, True), (10, True), (10, False)):
                step(given * number, factor=factor, add=add)
                expected += float(given.sum()) * number * factor * add
                calls += 1
                assert total.item() == expected
    assert [graphs.asked.count(kind) for kind in ("capture", "eager")] == [9, 9 * EAGER_CALLS]
    assert len(graphs.asked) - 9 == calls


# Eight windows: three steps an epoch, of three, three and two. The reference is fixed by the 20th step.
SETTINGS = {"batch": 3, "steps": 30, "validate_every": 5, "lr": 1e-3}
VARIANTS: dict[str, dict[str, Any]] = {
    "warm-up, adam": {"rate": 0.9},
    "ascent": {"betas": "none", "reference": 0.01, "warmup_epochs": 2},
    "accumulation": {"batch": 2, "accumulate": 2, "window": 3, "betas": "none", "reference": 0.01},
    "VideoUT": {"model": "ut", "coupling": "absolute", "rate": 0.9, "precision": "bf16"},
}


@pytest.fixture
def trainer_for(tiny_config: Config, tmp_path: Path) -> Callable[..., Trainer]:
    def make(name: str, variant: str, graphs: CudaGraphs | None) -> Trainer:
        config = tiny_config(**{**SETTINGS, **VARIANTS[variant]})
        return new_trainer(RunFolder.create(tmp_path / name, config), config, graphs)

    return make


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_captured_training_is_the_eager_one(trainer_for: Callable[..., Trainer], variant: str) -> None:
    """Bit by bit, from warm-up to updates, with the smaller batch that ends an epoch."""
    graphs = TapeGraphs()
    captured, eager = trainer_for("captured", variant, graphs), trainer_for("eager", variant, EagerGraphs())
    for trainer in (captured, eager):
        trainer.run(progress=False)
    assert graphs.asked.count("replay") >= 10
    assert_same_runs(captured.folder, eager.folder)
    assert captured.constraints.multipliers.max() > 0
    if variant == "warm-up, adam":
        # The plain one updates with another kernel and a rate in float64. Measured: weights of 0.3 differ by 4e-7.
        plain = trainer_for("plain", variant, None)
        plain.run(progress=False)
        torch.testing.assert_close(captured.model.dictionary, plain.model.dictionary, rtol=1e-5, atol=1e-5)
        multipliers = captured.constraints.multipliers, plain.constraints.multipliers
        torch.testing.assert_close(*multipliers, rtol=1e-4, atol=1e-6)


def test_a_captured_training_continues_bit_for_bit(trainer_for: Callable[..., Trainer]) -> None:
    whole, first, second = (trainer_for(name, "ascent", TapeGraphs()) for name in ("whole", "first", "second"))
    whole.run(progress=False)
    while first.step < 15:
        first._train_step()
        first.step += 1
    first._save_checkpoint()
    second.load(load_checkpoint(first.folder.checkpoint))
    second.run(progress=False)
    assert all(map(torch.equal, second.model.parameters(), whole.model.parameters()))
    assert flat(second.constraints.state_dict()) == flat(whole.constraints.state_dict())


def test_a_checkpoint_goes_on_where_the_optimizer_works_elsewhere() -> None:
    """Written where the rate is a tensor of the device, here a CPU, read where it is a number, and back."""
    parameters = [torch.nn.Parameter(torch.arange(3.0)) for _ in range(2)]
    built = [
        build_optimizer([parameter], 0.5, on_device=on_device)
        for parameter, on_device in zip(parameters, (True, False), strict=True)
    ]
    for source, target in (built, built[::-1]):
        (group,), (other,) = source.param_groups, target.param_groups
        (parameter,), (copy,) = group["params"], other["params"]
        kept = {name: other[name] for name in ("fused", "capturable")}
        parameter.grad = copy.grad = torch.ones(3)
        source.step()
        copy.data.copy_(parameter)
        load_optimizer_state(target, source.state_dict())
        other = target.param_groups[0]
        assert {name: other[name] for name in kept} == kept
        assert isinstance(other["lr"], Tensor) == other["capturable"]
        for optimizer in (source, target):
            with NoHostSync() if optimizer is built[0] else nullcontext():
                set_rate(optimizer, 0.25)
                optimizer.step()
        torch.testing.assert_close(parameter, copy, rtol=1e-6, atol=1e-6)
