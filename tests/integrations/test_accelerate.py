"""FSDP2 as accelerate sets it up, through the Trainer and a plain loop: two processes on CPUs against one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cdt_fast import DescentConstraints, attach_layer_losses
from cdt_fast.integrations import with_descent
from tests.integrations.integration_cases import (
    ASCENT,
    LEARNING_RATE,
    assert_same_weights,
    expected_run,
    language_model,
    rows,
    stacked,
)
from tests.ranks import RANKS, in_ranks

# All of it is one run of two processes: `results`.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__)]

KINDS = ("loop", "trainer")
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


def by_loop(rank: int, folder: str) -> tuple[Any, torch.Tensor]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = language_model()
    handle = attach_layer_losses(model)
    constraints = DescentConstraints(handle.num_constraints, **ASCENT)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    data = rows()
    for step in STEPS:
        mine = step[:1] if rank == 0 else step[1:]  # one row here, three there
        batch = stacked([data[index] for index in mine])
        count: Any = accelerator.reduce((batch["labels"][:, 1:] != -100).sum(), "sum")
        items = count / RANKS
        handle.weights = constraints.weights()
        output = model(**batch, num_items_in_batch=items)
        accelerator.backward(output.loss)
        optimizer.step()
        optimizer.zero_grad()
        constraints.record(output.layer_losses, output.layer_loss_count)
        constraints.step()
    return model, constraints.multipliers.clone()


def by_trainer(rank: int, folder: str) -> tuple[Any, torch.Tensor]:
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

        def create_optimizer(self, *args: Any) -> Any:  # with FSDP a Trainer takes none that was made before
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)  # type: ignore[union-attr]
            return self.optimizer

    model = language_model()
    arguments = TrainingArguments(
        f"{folder}/out",
        use_cpu=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=len(STEPS),
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        fsdp="full_shard auto_wrap",
        fsdp_config={"version": 2, "fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )
    trainer = with_descent(InOrder)(model, arguments, train_dataset=rows(), constraints=ASCENT)
    trainer.train()
    return trainer.model_wrapped, trainer.constraints.multipliers.clone()


def work(rank: int, folder: str) -> dict[str, Any]:
    from accelerate.state import AcceleratorState
    from torch.distributed.fsdp import FSDPModule

    shard_on_cpus()
    results = {}
    for kind in KINDS:
        model, multipliers = {"loop": by_loop, "trainer": by_trainer}[kind](rank, folder)
        AcceleratorState._reset_state()
        assert issubclass(type(model), FSDPModule), type(model)
        whole = {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}
        results[kind] = (multipliers, whole)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    accelerate = pytest.importorskip("accelerate")
    if not hasattr(accelerate.FullyShardedDataParallelPlugin, "fsdp_version"):
        pytest.skip(f"accelerate {accelerate.__version__} has no FSDP2")
    return in_ranks(work, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", KINDS)
def test_two_shards_are_one_process(kind: str, results: list[dict[str, Any]]) -> None:
    multipliers, _, weights = expected_run(STEPS)
    model = language_model()
    assert multipliers[-1].min() > 0
    for rank in range(RANKS):
        found, of_rank = results[rank][kind]
        assert torch.equal(found, results[0][kind][0])
        torch.testing.assert_close(found, multipliers[-1], rtol=0, atol=1e-6)
        model.load_state_dict(of_rank)
        assert_same_weights(model, weights, 1e-6)
