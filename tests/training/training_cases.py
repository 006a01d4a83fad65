"""What tests of trainings share: ends at a chosen step, and tensors without values that show where a host waits."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cdt_fast.tasks import task_of
from cdt_fast.training import loop, optimizer
from cdt_fast.training.execution import Execution, precision_of
from cdt_fast.training.loop import Trainer
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.settings import VideoSettings
from tests.constraints.constraint_cases import NoHostSync
from tests.runs import load_data


class Killed(BaseException):
    """Nobody handles it: what is on the disk is what a `kill -9` at this moment leaves."""


@contextmanager
def around(name: str, before: Callable[[Trainer], None] | None = None, after: Any = None) -> Iterator[None]:
    """Call these before and after every call of a method of the trainer."""
    original = getattr(Trainer, name)

    def wrapped(trainer: Trainer) -> Any:
        if before is not None:
            before(trainer)
        result = original(trainer)
        if after is not None:
            after(trainer)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, name, wrapped)
        yield


@contextmanager
def signal_after(number: signal.Signals, *steps: int) -> Iterator[None]:
    """Raise a signal in the trainings of the block, at the end of each of these steps once."""
    pending = list(steps)

    def raise_it(trainer: Trainer) -> None:
        if pending and trainer.step + 1 == pending[0]:
            pending.pop(0)
            signal.raise_signal(number)

    with around("_train_step", after=raise_it):
        yield


class HostWaits(AssertionError):
    """Something would wait for the device."""


class NoWaiting(TorchDispatchMode):
    """Refuses what reads a number of the device on the host, and what mixes tensors of both.

    A tensor without values refuses most of the first by itself. A tensor of the host among those of the device is
    copied there, for which the host waits: `torch.where(mask, torch.tensor(0.0), tensor)` does so too.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        devices = {given.device.type for given in tree_leaves((args, kwargs)) if isinstance(given, Tensor)}
        target = kwargs.get("device")
        if target is not None and devices:
            devices.add(torch.device(target).type)
        if len(devices) > 1 or (function.overloadpacket.__name__ in NoHostSync.READS and devices != {"cpu"}):
            raise HostWaits(f"the host would wait for the device in {function} on {sorted(devices)}")
        return function(*args, **kwargs)


class _NumbersStay(TorchFunctionMode):
    """Refuses `torch.tensor(numbers, device=…)`, whose copy to the device no other mode sees."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None):
        device = torch.device((kwargs or {}).get("device") or "cpu")
        if function in (torch.tensor, torch.as_tensor) and device.type != "cpu" and not isinstance(args[0], Tensor):
            raise HostWaits(f"the host would wait for the copy of {args[0]} to {device}")
        return function(*args, **(kwargs or {}))


@contextmanager
def never_waiting(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """`HostWaits`, or torch's own error, wherever a step on meta tensors would wait for the device of such tensors.

    Custom ops run what they run on a GPU on meta tensors too, in place of only saying what shape comes out.
    """
    with patch.context() as inside, _NumbersStay(), NoWaiting():
        for name, definition in list(OPDEFS.items()):
            if name.startswith("cdt_fast::"):
                inside.setattr(definition, "_abstract_fn", definition._init_fn)
        # Meta tensors have no autocast.
        inside.setattr(torch, "is_autocast_enabled", lambda *_: False)
        inside.setattr(torch, "autocast", lambda *_, **__: nullcontext())
        yield


class _HostGenerator(torch.Generator):
    """There is no generator of tensors without values; that of the host stands for it."""

    def __new__(cls, *_: Any) -> _HostGenerator:
        return super().__new__(cls)


def meta_trainer(config: VideoSettings, folder: Path, patch: pytest.MonkeyPatch) -> Trainer:
    """A trainer all of whose tensors of the device, frames too, are without values."""
    meta = torch.device("meta")
    execution = Execution(meta, precision_of(config, meta, task_of(config).BF16_ON_CPU), captured=False)
    with patch.context() as inside:
        inside.setattr(torch, "Generator", _HostGenerator)
        inside.setattr(loop, "resolve_execution", lambda *_: execution)
        # Of tensors without values torch has no fused update.
        inside.setattr(optimizer, "AdamW", lambda trained, fused, **options: torch.optim.AdamW(trained, **options))
        trainer = Trainer(RunFolder.create(folder, config), config, task_of(config), load_data(config))
    frames = config.data.window, config.data.size, config.data.size
    empty = lambda windows: torch.empty((len(windows), *frames), dtype=torch.uint8, device="meta")  # noqa: E731
    patch.setattr(trainer.data.train, "batch", empty)
    return trainer
