"""The primal-dual loop: where models, constraints and data meet."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from cdt_fast.allocator import keep_freed_memory
from cdt_fast.building import build_constraints, build_model, load_data, steps_an_epoch, windows_a_step
from cdt_fast.checkpoint import load_checkpoint, save_checkpoint
from cdt_fast.config import RunConfig
from cdt_fast.data import VideoData, add_noise, to_patches
from cdt_fast.descent import FeasibilityReport
from cdt_fast.errors import InputError
from cdt_fast.evaluation import mean_depth_losses
from cdt_fast.models import DUST
from cdt_fast.runs import RunFolder


class Interrupted(Exception):
    """A signal asked the training to stop; its state is in the checkpoint."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} after step {step}")
        self.signal_number = signal_number


def train_video(run: RunFolder, config: RunConfig, *, resume: bool = False, progress: bool = True) -> None:
    """Train to the end, or until a signal, and leave the best model in `run.model`.

    Args:
        run: the run folder; its `config.toml` exists.
        config: the settings.
        resume: continue from the checkpoint, bit for bit. Without one the run starts at its beginning.
        progress: show a progress bar on stderr.

    Raises:
        Interrupted: SIGINT or SIGTERM came; a checkpoint was written first.
        InputError: the settings, the data or the checkpoint cannot be used, or the losses are no longer finite.
    """
    keep_freed_memory()
    accelerator = Accelerator(cpu=config.training.device == "cpu")
    _set_precision(config, accelerator.device)
    trainer = Trainer(run, config, load_data(config, progress and accelerator.is_main_process), accelerator)
    if resume:
        run.remove_leftovers()
        if run.checkpoint.exists():
            trainer.load(load_checkpoint(run.checkpoint))
        run.forget_metrics_after(trainer.step)
    trainer.run(progress)


def _set_precision(config: RunConfig, device: torch.device) -> None:
    if config.training.device == "cuda" and device.type != "cuda":
        raise InputError("[training] device is cuda, but torch finds no CUDA GPU here")
    if config.training.precision == "tf32" and device.type != "cuda":
        raise InputError("[training] precision tf32 needs an NVIDIA GPU; use fp32 or bf16 on the CPU")
    torch.backends.cuda.matmul.allow_tf32 = config.training.precision == "tf32"


class _LayerLosses(nn.Module):
    """The model's losses as a forward, so that the hooks of a distributed wrapper fire."""

    def __init__(self, model: DUST, precision: str) -> None:
        super().__init__()
        self.model = model
        self._bf16 = precision == "bf16"

    def forward(self, noisy: Tensor, clean: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(noisy.device.type, torch.bfloat16) if self._bf16 else nullcontext():
            return self.model.layer_losses(noisy, clean, weights)


class Trainer:
    """One run in memory.

    Args:
        run: its folder.
        config: its settings.
        data: its windows.
        accelerator: device and distribution.
    """

    def __init__(self, run: RunFolder, config: RunConfig, data: VideoData, accelerator: Accelerator) -> None:
        self.folder, self.config, self.data, self.accelerator = run, config, data, accelerator
        training = config.training
        torch.manual_seed(training.seed)
        self.device = accelerator.device
        self.model = build_model(config)
        self.losses = accelerator.prepare(_LayerLosses(self.model, training.precision))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=training.lr, weight_decay=training.weight_decay)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._relative_rate)
        self.steps_an_epoch = steps_an_epoch(config, data)
        self.constraints = build_constraints(config, data, self.device)
        self.constrained = config.constraints.constrained
        self.unconstrained_weights = torch.eye(config.model.layers + 1)[-1]
        self.noise = torch.Generator(self.device).manual_seed(training.seed + 1_000_003 * accelerator.process_index)
        self.step = 0
        self.best: dict[str, Any] | None = None
        self._logged_sums = torch.zeros(config.model.layers + 2, dtype=torch.float64, device=self.device)
        self._signal: int | None = None

    def _relative_rate(self, step: int) -> float:
        training = self.config.training
        if step < training.warmup_steps:
            return (step + 1) / (training.warmup_steps + 1)
        done = (step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
        if training.schedule == "constant":
            return 1.0
        return 1 - done if training.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))

    def run(self, progress: bool = True) -> None:
        """Train from the current step to the last."""
        training = self.config.training
        shown = progress and self.accelerator.is_main_process
        bar = tqdm(total=training.steps, initial=self.step, desc=self.folder.name, unit="step", disable=not shown)
        with self._signals_noted(), bar, _metric_writers(self.folder, training.tensorboard, self.accelerator) as write:
            started = time.perf_counter()
            while self.step < training.steps:
                self._train_step()
                self.step += 1
                last = self.step == training.steps
                interrupted = self._signal is not None
                if last or interrupted or self.step % training.log_every == 0:
                    entry = self._log_entry(time.perf_counter() - started)
                    started = time.perf_counter()
                    write(entry)
                    bar.set_postfix_str(self._summary(entry), refresh=False)
                if last or self.step % training.validate_every == 0:
                    write({"step": self.step, "validation": self._validate()})
                if last or interrupted or self.step % training.checkpoint_every == 0:
                    self._save_checkpoint()
                bar.update()
                if self._signal is not None and not last:
                    if not interrupted:  # it came after this step's checkpoint was decided on
                        self._save_checkpoint()
                    raise Interrupted(self._signal, self.step)

    def _train_step(self) -> None:
        weights = self.constraints.weights() if self.constrained else self.unconstrained_weights
        indices = self._indices()
        ranks = self.accelerator.num_processes
        share = [chunk[self.accelerator.process_index :: ranks] for chunk in indices]
        tokens = sum(len(chunk) for chunk in indices) * self._tokens_a_window
        self.optimizer.zero_grad(set_to_none=True)
        for number, chunk in enumerate(share):
            frames = self.data.train.batch(chunk).to(self.device, torch.float32) / 255
            clean = to_patches(frames, self.config.data.patch, self.config.data.sequence)  # type: ignore[arg-type]
            noisy = add_noise(clean, self.config.data.gamma, self.data.sigma, self.noise)
            count = clean.shape[:-1].numel()
            gathered = nullcontext() if number == len(share) - 1 else self.accelerator.no_sync(self.losses)
            with gathered:
                total, per_layer = self.losses(noisy, clean, weights)
                # Distributed wrappers average the gradients of the ranks; the sum over ranks and micro-batches is due.
                self.accelerator.backward(total * (count * ranks / tokens))
            sums = per_layer.to(torch.float64) * count
            self._logged_sums[:-1] += sums
            self._logged_sums[-1] += count
            if self.constrained:
                self.constraints.record(sums, count)
        if self.config.training.clip is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.training.clip)
        self.optimizer.step()
        self.schedule.step()
        if self.constrained:
            self.constraints.step()
            if (self.step + 1) % self.steps_an_epoch == 0:
                self.constraints.epoch_end()

    @property
    def _tokens_a_window(self) -> int:
        return self.config.data.window * (self.config.data.size // self.config.data.patch) ** 2

    def _indices(self) -> list[list[int]]:
        """The windows of this step, a list a micro-batch: a function of seed and step alone."""
        epoch, position = divmod(self.step, self.steps_an_epoch)
        windows = windows_a_step(self.config)
        generator = torch.Generator().manual_seed(self.config.training.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.data.train), generator=generator).tolist()
        chosen = order[position * windows : (position + 1) * windows]
        batch = self.config.training.batch
        return [chosen[start : start + batch] for start in range(0, len(chosen), batch)]

    def _log_entry(self, seconds: float) -> dict[str, Any]:
        sums = self.accelerator.reduce(self._logged_sums, reduction="sum")
        losses = (sums[:-1] / sums[-1]).tolist()
        self._logged_sums.zero_()
        if not all(map(math.isfinite, losses)):
            raise InputError(
                f"{self.folder.path}: the losses of step {self.step} are not finite; the last checkpoint is kept. "
                f"Lower --lr (now {self.config.training.lr:g}) or --dual-lr and start again"
            )
        entry: dict[str, Any] = {
            "step": self.step,
            "epoch": self.step / self.steps_an_epoch,
            "loss": losses,
            "lr": self.schedule.get_last_lr()[0],
            "windows_per_second": float(sums[-1]) / self._tokens_a_window / seconds,
        }
        if self.constrained:
            entry["weights"] = self.constraints.weights().tolist()
            entry["multipliers"] = self.constraints.multipliers.tolist()
            entry["slacks"] = self.constraints.slacks.tolist()
            entry["skipped_updates"] = int(self.constraints.skipped_updates)
        return entry

    def _summary(self, entry: dict[str, Any]) -> str:
        losses = " ".join(f"{loss:.3g}" for loss in entry["loss"])
        report = self.constraints.report(entry["loss"])
        worst = "" if report.worst_violation is None else f", worst {report.worst_violation:+.1%} @{report.worst_layer}"
        return f"loss by depth {losses}{worst}"

    def _validate(self) -> dict[str, Any]:
        """Losses on the validation windows; keeps the model if it is the best so far."""
        losses = mean_depth_losses(self.model, self.data.validation, self.config, self.data.sigma)
        report = self.constraints.report(losses)
        entry = {"loss": losses, "feasible": report.feasible, **_worst(report)}
        rank = _rank(report, losses[-1], self.constrained, self.constraints.layers)
        if self.best is None or rank < self.best["rank"]:
            self.best = {"rank": rank, "step": self.step, **entry}
            if self.accelerator.is_main_process:
                self.model.save_pretrained(self.folder.model)
        return entry

    def _save_checkpoint(self) -> None:
        if self.accelerator.is_main_process:
            save_checkpoint(self.folder.checkpoint, self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on, for `checkpoint.save_checkpoint`."""
        return {
            "step": self.step,
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "constraints": self.constraints.state_dict(),
            "best": self.best,
            "logged_sums": self._logged_sums,
            "noise": self.noise.get_state(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take up the state of a checkpoint.

        Raises:
            InputError: it belongs to other settings.
        """
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.load_state_dict(state["schedule"])
            self.constraints.load_state_dict(state["constraints"])
            self._logged_sums.copy_(state["logged_sums"])
            self.noise.set_state(state["noise"])
            torch.set_rng_state(state["random"])
            if state["random_cuda"]:
                torch.cuda.set_rng_state_all(state["random_cuda"])
        except (KeyError, RuntimeError, ValueError) as error:
            raise InputError(f"{self.folder.checkpoint}: does not fit config.toml ({error})") from error
        self.step, self.best = state["step"], state["best"]

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        """Note SIGINT and SIGTERM in place of acting on them: the step in progress is finished and saved first."""

        def note(number: int, frame: FrameType | None) -> None:
            if self._signal is not None:  # asked twice: stop at once
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            self._signal = number

        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _worst(report: FeasibilityReport) -> dict[str, Any]:
    return {"worst_layer": report.worst_layer, "worst_violation": report.worst_violation}


def _rank(report: FeasibilityReport, final_loss: float, constrained: bool, layers: int) -> list[float]:
    """Lower is better: all constraints known, then feasible (or least violated), then the loss of the last depth."""
    if not constrained:
        return [final_loss]
    unknown = sum(violation is None for violation in report.violation[1:])
    excess = 0.0 if report.feasible else max(report.worst_violation or 0.0, 0.0)
    return [unknown, excess, final_loss]


@contextmanager
def _metric_writers(run: RunFolder, tensorboard: bool, accelerator: Accelerator) -> Iterator[Any]:
    """A function that appends one entry to `metrics.jsonl`, and to TensorBoard's files if asked."""
    if not accelerator.is_main_process:
        yield lambda entry: None
        return
    board = None
    if tensorboard:
        from cdt_fast.errors import require

        require("tensorboard", "tensorboard", "--tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(str(run.path / "tensorboard"))
    with run.metrics.open("a", encoding="utf-8") as file:

        def write(entry: dict[str, Any]) -> None:
            file.write(json.dumps(entry, allow_nan=False) + "\n")
            file.flush()
            if board is not None:
                _write_scalars(board, entry)

        try:
            yield write
        finally:
            if board is not None:
                board.close()


def _write_scalars(board: Any, entry: dict[str, Any]) -> None:
    step = entry["step"]
    for group, values in {**entry, **entry.get("validation", {})}.items():
        prefix = f"validation/{group}" if "validation" in entry else group
        if isinstance(values, list):
            for depth, value in enumerate(values):
                board.add_scalar(f"{prefix}/{depth}", value, step)
        elif isinstance(values, int | float) and group != "step":
            board.add_scalar(prefix, values, step)
