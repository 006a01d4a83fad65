"""Two processes that hold unequal shares of a batch against one that holds it all: DDP and FSDP2 on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cdt_fast.models.layer_losses import attach_layer_losses
from tests.models.layer_loss_cases import WEIGHTS, classifier, gradients, language_model, rows, tokens
from tests.ranks import RANKS, in_ranks

# All of it is one run of two processes: `results`.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(__name__)]

SHARES = (slice(0, 1), slice(1, 4))  # rows of a batch


def batch(kind: str) -> dict[str, Tensor]:
    return rows(batch=4) if kind == "classifier" else tokens(batch=4)


def make(kind: str) -> Any:
    return (classifier if kind == "classifier" else language_model)()


def step(model: Any, inputs: dict[str, Tensor], items: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of the losses, their count, and the loss of this share; its gradients are in the model."""
    output = model(**inputs, num_items_in_batch=items)
    output.loss.backward()
    return output.layer_losses * output.layer_loss_count, output.layer_loss_count, output.loss.detach()


def wrap(kind: str, model: Any) -> Any:
    if kind in ("classifier", "ddp"):
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if kind == "fsdp2, head apart":
        fully_shard(model.model.norm, mesh=mesh)
        fully_shard(model.lm_head, mesh=mesh)
    if kind == "fsdp2, norm and head together":
        fully_shard([model.model.norm, model.lm_head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


KINDS = ("classifier", "ddp", "fsdp2", "fsdp2, head apart", "fsdp2, norm and head together")


def work(rank: int, folder: str) -> dict[str, Any]:
    results = {}
    for number, kind in enumerate(KINDS):
        model = make(kind)
        if number % 2:  # before the wrapper, or after it
            handle = attach_layer_losses(model)
            wrapped = wrap(kind, model)
        else:
            wrapped = wrap(kind, model)
            handle = attach_layer_losses(wrapped)
        handle.weights = WEIGHTS
        share = {name: value[SHARES[rank]] for name, value in batch(kind).items()}
        # Gradients are averaged over the ranks: each divides by the mean number of items, as trainers do.
        items = torch.tensor(items_of(kind) / RANKS)
        step(wrapped, share, items)
        wrapped.zero_grad()
        sums, count, loss = step(wrapped, share, items)
        reduced = torch.cat([sums, count.to(sums.dtype).reshape(1)])
        dist.all_reduce(reduced)
        found = {}
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        results[kind] = (reduced, loss, found)
    return results


def items_of(kind: str) -> int:
    labels = batch(kind)["labels"]
    return int(((labels if kind == "classifier" else labels[:, 1:]) != -100).sum())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_ranks(work, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_one(kind: str, results: list[dict[str, Any]]) -> None:
    model, inputs = make(kind), batch(kind)
    attach_layer_losses(model).weights = WEIGHTS
    alone = model(**inputs)
    gradient = gradients(model, alone.loss)
    losses = []
    for rank in range(RANKS):
        reduced, loss, found = results[rank][kind]
        torch.testing.assert_close(reduced[:-1] / reduced[-1], alone.layer_losses, rtol=1e-6, atol=1e-9)
        assert reduced[-1] == alone.layer_loss_count == items_of(kind)
        losses.append(loss)
        for name, of_parameter in found.items():
            expected = gradient[name]
            torch.testing.assert_close(
                torch.zeros_like(expected) if of_parameter is None else of_parameter, expected, rtol=1e-6, atol=1e-9
            )
    torch.testing.assert_close(torch.stack(losses).mean(), alone.loss.detach(), rtol=1e-6, atol=0)
