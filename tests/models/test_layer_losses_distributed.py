"""Two processes that hold unequal shares of a batch against one that holds it all: DDP and FSDP2 on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cdt_fast.models.layer_losses import attach_layer_losses
from tests.models.layer_loss_cases import WEIGHTS, build, counted, gradients, rows, tokens
from tests.ranks import RANKS, in_ranks

# All of it is one run of two processes: `results`.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__)]

SHARES = (slice(0, 1), slice(1, 4))  # rows of a batch
KINDS = ("classifier", "ddp", "fsdp2", "fsdp2, head apart", "fsdp2, norm and head together")


def case(kind: str) -> tuple[Any, dict[str, Tensor], int]:
    """Return a model, its batch, and how many of its labels count."""
    name, batch = ("bert", rows(batch=4)) if kind == "classifier" else ("llama", tokens(batch=4))
    return build(name), batch, counted(name, batch)


def wrap(kind: str, model: Any) -> Any:
    if kind in ("classifier", "ddp"):
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh, norm, head = dist.device_mesh.init_device_mesh("cpu", (RANKS,)), model.model.norm, model.lm_head
    apart = {"fsdp2": [], "fsdp2, head apart": [norm, head]}.get(kind, [[norm, head]])
    for part in (*model.model.layers, *apart):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def work(rank: int, folder: str) -> dict[str, Any]:
    results = {}
    for number, kind in enumerate(KINDS):
        model, batch, items = case(kind)
        if number % 2:  # before the wrapper, or after it
            handle = attach_layer_losses(model)
            wrapped = wrap(kind, model)
        else:
            wrapped = wrap(kind, model)
            handle = attach_layer_losses(wrapped)
        handle.weights = WEIGHTS
        share = {name: value[SHARES[rank]] for name, value in batch.items()}
        output: Any = None
        for _ in range(2):  # with the check of the first forward, and without
            wrapped.zero_grad()
            # Gradients are averaged over the ranks: each divides by the mean number of items, as trainers do.
            output = wrapped(**share, num_items_in_batch=torch.tensor(items / RANKS))
            output.loss.backward()
        count = output.layer_loss_count
        reduced = torch.cat([output.layer_losses * count, count.double().reshape(1)])
        dist.all_reduce(reduced)
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}
        results[kind] = (reduced, output.loss.detach(), whole)
    results["mixed"] = (in_mixed_precision(None), in_mixed_precision(torch.bfloat16))
    return results


def in_mixed_precision(output_dtype: torch.dtype | None) -> tuple[Any, Tensor]:
    """The loss and what was measured, of a batch whose items bfloat16 does not hold."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, batch, _ = case("fsdp2")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=output_dtype)
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    for part in (*model.model.layers, [model.model.norm, model.lm_head], model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    handle = attach_layer_losses(model)
    handle.items = torch.tensor(387.0)
    handle.weights = [0.0] * handle.num_constraints + [1.0]
    output = model(**batch)
    assert handle.measured is not None
    losses, count = handle.measured
    return output.loss.detach(), losses * count / handle.items


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_ranks(work, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_one(kind: str, results: list[dict[str, Any]]) -> None:
    model, batch, items = case(kind)
    attach_layer_losses(model).weights = WEIGHTS
    alone = model(**batch)
    gradient = gradients(model, alone.loss)
    for reduced, _, found in (result[kind] for result in results):
        torch.testing.assert_close(reduced[:-1] / reduced[-1], alone.layer_losses, rtol=1e-6, atol=1e-9)
        assert reduced[-1] == alone.layer_loss_count == items
        for name, expected in gradient.items():
            given = torch.zeros_like(expected) if found[name] is None else found[name]
            torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-9)
    mean = torch.stack([result[kind][1] for result in results]).mean()
    torch.testing.assert_close(mean, alone.loss.detach(), rtol=1e-6, atol=0)


def test_mixed_precision_rounds_no_number_of_items_nor_measured_losses(results: list[dict[str, Any]]) -> None:
    for exact, rounded in (result["mixed"] for result in results):
        torch.testing.assert_close(exact[0].double(), exact[1][-1].double(), rtol=1e-6, atol=0)
        assert (rounded[0].dtype, rounded[1].dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(rounded[1], exact[1], rtol=1e-6, atol=0)
