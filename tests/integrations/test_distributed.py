"""Two processes on CPUs against one: the Trainer under DDP and FSDP2, a loop with accelerate, Lightning."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.distributed.fsdp import FSDPModule

from cdt_fast import DescentConstraints, attach_layer_losses, with_descent
from tests.integrations.integration_cases import (
    ASCENT,
    LEARNING_RATE,
    LIGHTNING,
    SETTINGS,
    assert_same_weights,
    evaluated,
    expected_run,
    in_order,
    language_model,
    logged,
    rows,
    stacked,
)
from tests.ranks import RANKS, in_ranks

# All of it is one run of two processes: `results`.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__)]

KINDS = ("trainer", "trainer, fsdp2", "accelerate, fsdp2", "lightning")  # the last ends the group
SHARDED = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
STEPS = [[0, 1, 2, 3], [4, 5, 6, 7]] * 2  # rows of an optimizer step; row i has i % 4 + 1 labels that count


def shard_on_cpus() -> None:
    """Let accelerate shard on CPUs.

    Asked for FSDP there it makes DDP without a word: its AcceleratorState looks for FSDP on kinds of device that a list
    names, and CPUs are not in it. All that follows knows them.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    init = AcceleratorState.__init__

    def initialize(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = initialize


def by_trainer(rank: int, folder: str, sharded: bool = False) -> tuple[Any, Any]:
    from transformers import Trainer, TrainingArguments

    class Descending(in_order(Trainer)):
        def create_optimizer(self, *args: Any) -> Any:  # with FSDP a Trainer takes none that was made before
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
            return self.optimizer

    model = language_model()
    changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    if sharded:
        changes = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2, **SHARDED}}
    settings = {**SETTINGS, "max_steps": len(STEPS), **changes}
    arguments = TrainingArguments(f"{folder}/out", **settings)
    data = {"train_dataset": rows(), "eval_dataset": rows()}
    trainer = with_descent(Descending)(model, arguments, constraints=ASCENT, **data)
    trainer.train()
    if sharded:
        return trainer.model_wrapped, {"multipliers": trainer.constraints.multipliers.clone()}
    found = {"multipliers": trainer.constraints.multipliers.clone(), "losses": logged(trainer)}
    found["evaluated"] = evaluated(trainer)
    return trainer.model, found


def by_lightning(rank: int, folder: str) -> tuple[Any, Any]:
    import lightning  # type: ignore[import-not-found]

    from cdt_fast import DescentCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = language_model()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)

    module, descent = Module(), DescentCallback(ASCENT)
    settings: dict[str, Any] = {**LIGHTNING, "strategy": "ddp", "devices": RANKS, "default_root_dir": folder}
    data: Any = torch.utils.data.DataLoader(rows()[rank::RANKS], batch_size=1)  # type: ignore[arg-type]
    settings["use_distributed_sampler"] = False  # its own shuffles
    lightning.Trainer(**settings, callbacks=[descent]).fit(module, data)
    return module.model, {"multipliers": descent.constraints.multipliers.clone()}


def by_accelerate(rank: int, folder: str) -> tuple[Any, Any]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    model = language_model()
    handle = attach_layer_losses(model)
    constraints = DescentConstraints(handle.num_constraints, **ASCENT)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **wrap))
    model, optimizer = accelerator.prepare(model, optimizer)
    data = rows()
    for step in STEPS:
        mine = step[:1] if rank == 0 else step[1:]  # one row here, three there
        batch = stacked([data[index] for index in mine])
        items = (batch["labels"][:, 1:] != -100).sum()
        dist.all_reduce(items)
        handle.weights = constraints.weights()
        output = model(**batch, num_items_in_batch=items / RANKS)
        accelerator.backward(output.loss)
        optimizer.step()
        optimizer.zero_grad()
        constraints.record(output.layer_losses, output.layer_loss_count)
        constraints.step()
    return model, {"multipliers": constraints.multipliers}


WAYS = dict(zip(KINDS, (by_trainer, partial(by_trainer, sharded=True), by_accelerate, by_lightning), strict=True))


def work(rank: int, folder: str) -> dict[str, Any]:
    results = {}
    for kind in KINDS:
        if kind == "lightning" and importlib.util.find_spec("lightning") is None:
            continue
        if kind == "trainer, fsdp2":
            shard_on_cpus()
        model, found = WAYS[kind](rank, folder)
        AcceleratorState._reset_state()
        assert ("fsdp2" in kind) == isinstance(model, FSDPModule)
        whole = {}
        for name, parameter in model.named_parameters():
            gather = getattr(parameter.detach(), "full_tensor", parameter.detach)
            whole[name.removeprefix("module.")] = gather().clone()
        results[kind] = (found, whole)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    found = in_ranks(work, folder)
    assert (folder / "out" / "checkpoint-2" / "descent_constraints.safetensors").exists()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_one(kind: str, results: list[dict[str, Any]]) -> None:
    if kind not in results[0]:
        pytest.skip(f"the package {kind!r} is not installed")
    multipliers, losses, weights = expected_run(STEPS)
    model = language_model()
    for rank in range(RANKS):
        found, of_rank = results[rank][kind]
        assert torch.equal(found["multipliers"], results[0][kind][0]["multipliers"])
        torch.testing.assert_close(found["multipliers"], multipliers[-1], rtol=0, atol=1e-6)
        model.load_state_dict(of_rank)
        assert_same_weights(model, weights, 1e-6)
    assert multipliers[-1].min() > 0
    if kind == "trainer":
        found = results[1][kind][0]
        torch.testing.assert_close(found["losses"], losses, rtol=0, atol=1e-6)
        after = expected_run([*STEPS, list(range(8))])[1][-1]  # losses of all rows at the weights that it ended with
        torch.testing.assert_close(found["evaluated"], after, rtol=0, atol=1e-6)
