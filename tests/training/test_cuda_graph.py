"""`--cuda-graph` without a GPU: what is captured and replayed when, and that a replay is the step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DynamoBackend
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.training.checkpoint import load_checkpoint
from cdt_fast.training.cuda_graph import EAGER_CALLS, CapturedStep, CudaGraphs, Graphs
from cdt_fast.training.execution import resolve_execution
from cdt_fast.training.loop import Trainer
from cdt_fast.training.optimizer import build_optimizer, load_optimizer_state
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.settings import VideoSettings
from tests.graph_fakes import EagerGraphs, TapeGraphs
from tests.runs import new_trainer

Config = Callable[..., VideoSettings]
SHAPES_ALIKE: Any = SimpleNamespace(fixed_shapes=True)
SHAPES_DIFFER: Any = SimpleNamespace(fixed_shapes=False)
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")


def trainer_for(config: VideoSettings, folder: Path, graphs: Graphs | None = None) -> Trainer:
    run = RunFolder.create(folder, config)
    return new_trainer(run, config, graphs)


def test_a_kind_of_call_runs_eagerly_then_is_captured_then_replayed() -> None:
    graphs = EagerGraphs()
    step = CapturedStep(lambda x, *, factor: x * factor, graphs)
    for number in range(EAGER_CALLS + 2):
        assert torch.equal(step(torch.full((2,), float(number)), factor=3), torch.full((2,), 3.0 * number))
    assert graphs.asked == ["eager"] * EAGER_CALLS + ["capture", "replay", "replay"]


def test_every_shape_dtype_and_choice_is_a_kind_of_its_own() -> None:
    graphs = TapeGraphs()
    total = torch.zeros(())
    step = CapturedStep(lambda x, *, factor, add: total.add_(x.sum() * factor) if add else total, graphs)
    inputs = [torch.ones(2), torch.ones(3), torch.ones(3, dtype=torch.float64)]
    expected = 0.0
    calls = 0
    for round_number in range(EAGER_CALLS + 4):
        for given in inputs:
            for factor, add in ((1, True), (10, True), (10, False)):
                step(given * round_number, factor=factor, add=add)
                expected += float(given.sum()) * round_number * factor * add
                calls += 1
                assert total.item() == expected
    kinds = 9
    assert graphs.asked.count("capture") == kinds
    assert graphs.asked.count("eager") == kinds * EAGER_CALLS
    assert len(graphs.asked) - kinds == calls


def test_the_tape_shows_a_step_that_counts_on_the_host() -> None:
    """A stand-in that ran Python again would hide what a CUDA graph does not do."""
    count = [0]
    total = torch.zeros(())

    def counting() -> None:
        count[0] += 1
        total.add_(count[0])

    step = CapturedStep(counting, TapeGraphs())
    for _ in range(EAGER_CALLS + 3):
        step()
    assert total.item() == sum(range(EAGER_CALLS + 1)) + 3 * (EAGER_CALLS + 1)


# Eight windows: three steps an epoch, of three, three and two. The reference is fixed by the 20th step.
SETTINGS = {"batch": 3, "steps": 30, "validate_every": 5, "lr": 1e-3}
VARIANTS: dict[str, dict[str, Any]] = {
    "warm-up, adam": {"rate": 0.9},
    "ascent": {"betas": "none", "reference": 0.01, "warmup_epochs": 2},
    "accumulation": {"batch": 2, "accumulate": 2, "stride": 3, "betas": "none", "reference": 0.01},
    "VideoUT": {"model": "ut", "coupling": "absolute", "rate": 0.9, "precision": "bf16"},
}


def logged(trainer: Trainer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in entry.items() if name != "windows_per_second"}
        for entry in trainer.folder.read_metrics()
    ]


def same_state(left: Trainer, right: Trainer) -> None:
    assert all(map(torch.equal, left.model.parameters(), right.model.parameters()))
    there = right.constraints.state_dict()
    for name, value in left.constraints.state_dict().items():
        assert torch.equal(value, there[name]) if isinstance(value, Tensor) else value == there[name], name


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_captured_training_is_the_eager_one(tiny_config: Config, tmp_path: Path, variant: str) -> None:
    """Bit by bit, from warm-up to updates, with the smaller batch that ends an epoch."""
    config = tiny_config(**{**SETTINGS, **VARIANTS[variant]})
    graphs = TapeGraphs()
    captured = trainer_for(config, tmp_path / "captured", graphs)
    eager = trainer_for(config, tmp_path / "eager", EagerGraphs())
    captured.run(progress=False)
    eager.run(progress=False)
    assert graphs.asked.count("replay") >= 10
    same_state(captured, eager)
    assert logged(captured) == logged(eager)
    if config.constraints.constrained:
        assert captured.constraints.multipliers.max() > 0


def test_a_captured_training_is_the_plain_one_to_rounding(tiny_config: Config, tmp_path: Path) -> None:
    """The plain one updates with another kernel and a rate in float64. Measured: weights of 0.3 differ by 4e-7."""
    config = tiny_config(**SETTINGS, rate=0.9)
    captured, plain = trainer_for(config, tmp_path / "captured", TapeGraphs()), trainer_for(config, tmp_path / "plain")
    captured.run(progress=False)
    plain.run(progress=False)
    torch.testing.assert_close(captured.model.dictionary, plain.model.dictionary, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(captured.constraints.multipliers, plain.constraints.multipliers, rtol=1e-4, atol=1e-6)


def test_a_captured_training_continues_bit_for_bit(tiny_config: Config, tmp_path: Path) -> None:
    config = tiny_config(**{**SETTINGS, **VARIANTS["ascent"]})
    whole = trainer_for(config, tmp_path / "whole", TapeGraphs())
    whole.run(progress=False)
    first = trainer_for(config, tmp_path / "first", TapeGraphs())
    while first.step < 15:
        first._train_step()
        first.step += 1
    first._save_checkpoint()
    second = trainer_for(config, tmp_path / "second", TapeGraphs())
    second.load(load_checkpoint(first.folder.checkpoint))
    second.run(progress=False)
    same_state(second, whole)


def test_a_checkpoint_goes_on_where_the_optimizer_works_elsewhere() -> None:
    """Written where the rate is a tensor of the device, read where it is a number, and back."""
    parameters = [torch.nn.Parameter(torch.arange(3.0)) for _ in range(2)]
    built = [
        build_optimizer([parameter], 0.5, lambda step: 0.5**step, on_device=on_device)
        for parameter, on_device in zip(parameters, (True, False), strict=True)
    ]
    for (source, source_schedule), (target, target_schedule) in (built, built[::-1]):
        (parameter,), (copy,) = source.param_groups[0]["params"], target.param_groups[0]["params"]
        kept = {name: target.param_groups[0][name] for name in ("fused", "capturable")}
        rate = target.param_groups[0]["lr"]
        parameter.grad = copy.grad = torch.ones(3)
        source.step()
        source_schedule.step()
        copy.data.copy_(parameter)
        load_optimizer_state(target, source.state_dict())
        target_schedule.load_state_dict(source_schedule.state_dict())
        assert {name: target.param_groups[0][name] for name in kept} == kept
        assert isinstance(target.param_groups[0]["lr"], type(rate))
        if isinstance(rate, Tensor):
            assert target.param_groups[0]["lr"] is rate
        assert float(target.param_groups[0]["lr"]) == float(source.param_groups[0]["lr"])
        for optimizer, schedule in ((source, source_schedule), (target, target_schedule)):
            optimizer.step()
            schedule.step()
        torch.testing.assert_close(parameter, copy, rtol=1e-6, atol=1e-6)


@no_cuda
def test_cuda_graphs_need_a_gpu() -> None:
    with pytest.raises(InputError, match="needs a CUDA GPU"):
        CudaGraphs()
    with pytest.raises(InputError, match="needs a CUDA GPU"):
        CapturedStep(lambda: None)


@pytest.mark.parametrize(
    "launched",
    [{"num_processes": 2}, {"mixed_precision": "bf16"}, {"backend": DynamoBackend.INDUCTOR}, {"task": SHAPES_DIFFER}],
)
def test_what_a_capture_cannot_hold_is_launched(tiny_config: Config, launched: dict[str, Any]) -> None:
    described = {"num_processes": 1, "mixed_precision": "no", "backend": DynamoBackend.NO, "task": SHAPES_ALIKE}
    for given in ({}, launched):
        chosen: dict[str, Any] = {**described, **given}
        task, plugin = chosen.pop("task"), SimpleNamespace(backend=chosen.pop("backend"))
        accelerator: Any = SimpleNamespace(
            device=torch.device("cuda"), state=SimpleNamespace(dynamo_plugin=plugin), **chosen
        )
        captured = resolve_execution(tiny_config(device="auto", precision="bf16"), accelerator, task).captured
        assert captured == (not given)
