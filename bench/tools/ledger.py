"""Count what a training step launches, without a GPU: `python -m cdt_fast.bench.tools.ledger`.

The launches and bytes of every kernel, ours and torch's. A tensor counts each time that a kernel reads or writes all of
it, also where a cache would serve it. The models and their tokens are in bfloat16. Nothing here is a time.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cdt_fast.bench.suites import cross_entropy
from cdt_fast.bench.suites.step import Work, fused, training_step
from cdt_fast.bench.suites.support import Inputs
from cdt_fast.bench.tools.compile_kernels import DOCUMENT, Launch, OperatorsOnMeta, recording, write_between
from cdt_fast.ops.common import CARDS
from cdt_fast.tables import as_markdown

CARD = CARDS["H200"]
META = torch.device("meta")
# They allocate or make views, write without reading, or read no more than a shape.
NO_LAUNCH = ("empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "lift_fresh", "detach")
OVERWRITE = ("copy_", "fill_", "zero_")
SHAPE_ALONE = ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")


class Entry(NamedTuple):
    kernel: str
    moved: int  # bytes read and written


def constrained_step(work: Work) -> Callable[[], object]:
    """The constrained step, with optimizer and multipliers."""
    step = training_step(work, fused, META, dtype=torch.bfloat16)
    step()  # the optimizer makes its state
    return step


def losses(shape: cross_entropy.Shape) -> Callable[[], object]:
    """The losses of all depths through one head, and their gradients."""
    sizes = [*[(shape.tokens, shape.width)] * shape.depths, (shape.vocabulary, shape.width)]
    leaves = [torch.empty(size, dtype=torch.bfloat16, device=META, requires_grad=True) for size in sizes]
    return cross_entropy.fused(Inputs(leaves, [], [torch.empty(shape.tokens, dtype=torch.int64, device=META)]))


STEPS: dict[str, Callable[[], Callable[[], object]]] = {
    "DUST, 64,000 tokens": lambda: constrained_step(Work("DUST", 3200)),
    "VideoUT, 64,000 tokens": lambda: constrained_step(Work("VideoUT", 3200, tied=False, readout="next")),
    "cross-entropy, GPT2-small": lambda: losses(cross_entropy.SHAPES["gpu"][0]),
}


def recorded(prepare: Callable[[], Callable[[], object]]) -> tuple[list[Entry], list[Launch]]:
    """All launches of the step that `prepare` makes, and those of our kernels in full."""
    recorder = _Recorder()
    with mock.patch("torch.optim.adam._device_dtype_check_for_fused"), recording(CARD, recorder) as launches:
        step = prepare()
        launches.clear()
        recorder.entries.clear()
        step()
    return [*recorder.entries, *map(moved, launches)], launches


class _Recorder(OperatorsOnMeta):
    """Notes what torch's own operations on meta tensors read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    def library_call(self, function: Any, args: Any, kwargs: Any) -> Any:
        name, schema = function.overloadpacket.__name__, function._schema
        result = None if name.startswith("_fused_adam") else super().library_call(function, args, kwargs)
        written, read = _tensors(result), []
        held = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        aliases = [one.alias_info is not None and not one.alias_info.is_write for one in schema.returns]
        view = bool(aliases) and all(aliases) and all(one.untyped_storage()._cdata in held for one in written)
        given = {**dict(zip([one.name for one in schema.arguments], args, strict=False)), **kwargs}
        for argument in (one for one in schema.arguments if one.name in given):
            value = given[argument.name]
            writes = argument.alias_info is not None and argument.alias_info.is_write
            written += _tensors(value) if writes else []
            if name not in SHAPE_ALONE and not (writes and (argument.kwarg_only or name in OVERWRITE)):
                read += _tensors(value)
        if (read or written) and name not in NO_LAUNCH and not view:
            self.entries.append(Entry(name, _bytes(read) + _bytes(written)))
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_meta]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of different tensors; elements that an expanded dimension repeats count once."""
    return sum(
        one.element_size()
        * math.prod(size if step or not size else 1 for size, step in zip(one.shape, one.stride(), strict=True))
        for one in {id(one): one for one in tensors}.values()
    )


def moved(launch: Launch) -> Entry:
    """The bytes of a launch of ours: of every argument once, and of those that its kernel goes over more often."""
    name, given = launch.kernel.__name__, dict(launch.arguments)
    again: list[Tensor] = []
    if name == "cross_entropy_kernel" and given["scales"] is not None:
        again = [given["logits"]] * (1 + given["MORE"])  # a row that is not held is read twice
    elif name == "lista_step_forward_kernel":
        again = [given["codes"]]
    elif name == "lista_step_backward_kernel" and given["grad_codes"] is not None:
        again = [given["grad_output"], given["output"]]
    return Entry(name, _bytes(_tensors(given)) + sum(_bytes([tensor]) for tensor in again))


def table(steps: Mapping[str, Sequence[Entry]]) -> list[list[str]]:
    """The kernels of each step that move a hundredth of its bytes, and the whole step."""
    rows = [["step", "kernel", "launches", "GB"]]
    for step, entries in steps.items():
        groups: dict[str, list[int]] = defaultdict(list)
        for one in entries:
            groups["all"].append(one.moved)
            groups[one.kernel].append(one.moved)
        for kernel, some in sorted(groups.items(), key=lambda item: -sum(item[1])):
            if 100 * sum(some) >= sum(groups["all"]):
                rows.append([step, kernel, str(len(some)), f"{sum(some) / 1e9:.3f}"])
                step = ""
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m cdt_fast.bench.tools.ledger", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT}")
    options = parser.parse_args()
    rows = as_markdown(table({name: recorded(prepare)[0] for name, prepare in STEPS.items()}))
    print(rows)
    if options.write:
        write_between(DOCUMENT, "ledger", rows)


if __name__ == "__main__":
    main()
