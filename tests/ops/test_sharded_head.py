"""A head of which two processes hold unequal parts, against the whole head in one process."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from cdt_fast import ops
from tests.ops.battery import Case, build, results
from tests.ranks import in_ranks

PARTS = slice(0, 7), slice(7, 11)


def cases() -> list[Case]:
    sizes = {"atoms": 11, "tokens": 40}
    usual = {"softcap": 2.0, "label_smoothing": 0.1, "z_loss": 0.05, "chunk_tokens": 7}
    found = [build("layerwise_cross_entropy", "bias", "weights", **sizes, **usual)]
    found.append(build("layerwise_cross_entropy", "targets of depths", "class weights", shift=1, **sizes))
    return [*found, *(case.to(torch.float32) for case in found)]


def work(rank: int, folder: str) -> list[list[Tensor]]:
    found = []
    for case in cases():
        part = PARTS[rank]
        case.tensors.update({name: case.tensors[name][part] for name in ("weight", "bias") if name in case.tensors})
        case.options["shard"] = ops.HeadShard(dist.group.WORLD, part.start, 11)
        found.append(results(case))
    return found


def test_two_shards_are_the_whole_head(tmp_path: Path) -> None:
    for case, *shards in zip(cases(), *in_ranks(work, tmp_path), strict=True):
        expected, names = results(case), [None, None, *case.tensors]
        for name, whole, *parts in zip(names, expected, *shards, strict=True):
            if name in ("weight", "bias"):
                parts = [torch.cat(parts)]
            eps = 8 * torch.finfo(whole.dtype).eps
            for part in parts:
                torch.testing.assert_close(part, whole, rtol=eps, atol=eps)
