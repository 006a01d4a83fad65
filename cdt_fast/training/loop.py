"""The primal-dual loop: where models, constraints and data meet."""

from __future__ import annotations

import math
import signal
import sys
import time
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from cdt_fast.checks import InputError, printable
from cdt_fast.constraints.presets import PAPER_ROWS
from cdt_fast.files import write_json
from cdt_fast.training.checkpoint import check_data, load_checkpoint, run_identity, save_checkpoint
from cdt_fast.training.cuda_graph import CapturedStep, CudaGraphs
from cdt_fast.training.execution import disable_malloc_trim, resolve_execution
from cdt_fast.training.interruption import Interrupted, on_signals
from cdt_fast.training.optimizer import TrainingStep, build_constraints, build_optimizer, load_optimizer_state, set_rate
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.settings import RunSettings
from cdt_fast.training.task import Task, Workload

# Spreads the seeds of runs apart, so that no two count through the same seeds of noise.
_SEED_SPACING = 2_654_435_761
_SEEDS = 2**63
LOG_EVERY = 10  # optimizer steps between lines of metrics.jsonl

# Fresh random weights come within a tenth of the loss of their input, or of a guess. A denoiser that more than doubles
# the loss of its input has settings that do not fit each other, and does not recover in a training.
_SCATTER, _HOPELESS = 1.1, 2.0


def train(
    run: RunFolder, settings: RunSettings, task: Task, data: Any = None, *, resume: bool = False, progress: bool = True
) -> Any:
    """Train to the end, or until a signal, and leave the best model in `run.model`; `run.config` exists.

    `data` are what the task loads for these settings, where that was done, and are returned. `resume` continues from
    the checkpoint, if there is one, bit for bit. `progress` says on stderr what the data are and how the training goes.

    Interrupted: SIGINT, SIGTERM or SIGHUP came; a checkpoint was written first. InputError: settings, data or
    checkpoint cannot be used; another process trains the run; losses are not finite.
    """
    disable_malloc_trim()
    resolve_execution(settings, task)  # before the data are read
    with run.lock():
        resumes = resume and run.checkpoint.exists()
        if resumes:
            run.require_model()
        state = load_checkpoint(run.checkpoint, run=run_identity(settings)) if resumes else None
        data = task.load(settings, progress) if data is None else data
        trainer = Trainer(run, settings, task, data)
        if state is not None:
            trainer.load(state)
        if progress:
            print(*trainer.notes(), sep="\n", file=sys.stderr)
        run.remove_leftovers()
        run.truncate_metrics(-1 if state is None else trainer.step)  # a start is logged anew
        trainer.run(progress)
    return data


class Trainer:
    """One run in memory; its steps are captured in `graphs`, or in CUDA graphs where that works."""

    def __init__(
        self, run: RunFolder, settings: RunSettings, task: Task, data: Any, graphs: CudaGraphs | None = None
    ) -> None:
        self.folder, self.settings, self.task, self.data = run, settings, task, data
        torch.manual_seed(settings.training.seed % _SEEDS)
        self.execution = resolve_execution(settings, task)
        device = self.execution.device
        self.workload: Workload = task.build(settings, data, device)
        self.model: Any = self.workload.model
        self.losses = self.workload.losses(self.execution.autocast).to(device)
        if graphs is None and self.execution.captured:
            graphs = CudaGraphs(device)
        groups = getattr(self.model, "parameter_groups", None)
        trained = groups() if groups else self.model.parameters()
        # Eager steps on a GPU update as captured ones do, so that both come to the same weights.
        on_device = graphs is not None or device.type == "cuda"
        self.optimizer = build_optimizer(trained, self.workload.lr, on_device=on_device)
        self.steps_per_epoch = settings.steps_per_epoch(self.workload.training_samples)
        self.warmup_steps = settings.warmup_steps(self.workload.training_samples)
        layers = self.workload.num_constraints
        row = PAPER_ROWS.get(settings.preset or "")  # which keeps its own reference
        own = row is not None and settings.constraints.reference == row.constraints["reference"]
        largest = None if own else self.workload.guess_loss
        self.constraints = build_constraints(settings, layers, largest).to(device)
        # Without constraints they weigh the depths all the same, and "log" follows the losses for that.
        self._measured = settings.constrained or settings.objective == "log"
        self._identity: dict[str, Any] = data.identity
        self.step = 0
        self.best: dict[str, Any] | None = None
        self._logged_sums = torch.zeros(layers + 2, dtype=torch.float64, device=device)
        self._timed_samples = 0
        self._device_step = TrainingStep(
            losses=self.losses,
            optimizer=self.optimizer,
            logged_sums=self._logged_sums,
            constraints=self.constraints if self._measured else None,
        )
        self._captured = None if graphs is None else CapturedStep(self._step_on_buffers, graphs)

    def notes(self) -> list[str]:
        """Return what the user should know before the training starts or resumes."""
        notes = [self.workload.description, self.execution.describe(self.workload)]
        steps, warmup = self.workload.steps, self.warmup_steps
        if self.step:
            notes.append(f"resumes after step {self.step:,} of {steps:,}")
        if not self.settings.constrained:
            return notes
        if not self.constraints.any:
            return [*notes, "note: there are no constraints: --rate is none, and there are no --bounds"]
        if warmup + 1 >= steps:  # the first dual step weighs the losses of the step after it
            notes.append(
                f"note: the constraints come on after a warm-up of {warmup:,} steps, and the training ends at step "
                f"{steps:,}: it is one without constraints. Train longer, or with --warmup-epochs 0"
            )
        guess, given = self.workload.guess_loss, self.settings.constraints.reference
        used = self.constraints.options.reference
        if guess is not None and isinstance(given, float) and given > guess and self.constraints.descent.exists.any():
            effect = "which is used instead" if used != given else "but the paper's: layer 1 may raise the loss"
            notes.append(f"note: --reference {given:g} is above the loss of a guess, {guess:.4g}, {effect}")
        return notes

    def _rate(self) -> float:
        done = self.step / self.workload.steps
        shares = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
        return self.workload.lr * shares[self.settings.training.schedule]

    def run(self, progress: bool = True) -> None:
        """Train from the current step to the last; raises what `train` does."""
        steps, every = self.workload.steps, self.settings.validation_interval(len(self.data.validation))
        on_terminal = progress and sys.stderr.isatty()
        bar = tqdm(total=steps, initial=self.step, desc=self.folder.name, unit="step", disable=not on_terminal)
        signals: list[int] = []

        def note(number: int, _: object) -> None:
            if signals:  # a second one acts at once
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            signals.append(number)

        self.losses.train()
        if self.step == 0:
            self.folder.append_metrics({"step": 0, "validation": self._validate()})
        with on_signals(note, signal.SIGINT, signal.SIGTERM, signal.SIGHUP), bar:
            started = timed = time.perf_counter()
            first = self.step
            while self.step < steps:
                self._train_step()
                self.step += 1
                last = self.step == steps
                if last or self.step % LOG_EVERY == 0:
                    entry = self._log_entry(time.perf_counter() - timed)
                    self.folder.append_metrics(entry)
                    bar.set_postfix_str(self._summary(entry["loss"]), refresh=False)
                    timed = time.perf_counter()
                paused, saved = time.perf_counter(), last or self.step % every == 0
                # A step that a signal ended is neither logged nor validated: the resumed run would have to repeat it.
                if saved:
                    validation = self._validate()
                    self.folder.append_metrics({"step": self.step, "validation": validation})
                    self._save_checkpoint()  # before the print, which can fail: the model is of this step
                    if progress and not on_terminal:
                        minutes = (time.perf_counter() - started) / (self.step - first) * (steps - self.step) / 60
                        left = f"; about {minutes:.1f} minutes to go" if minutes > 0.5 else ""
                        summary = self._summary(validation["loss"])
                        print(f"step {self.step} of {steps}: held-out {summary}{left}", file=sys.stderr)
                elif signals:
                    self._save_checkpoint()
                bar.update()
                if signals:
                    raise Interrupted(signals[0], self.step)
                timed += time.perf_counter() - paused

    def _train_step(self) -> None:
        set_rate(self.optimizer, self._rate())
        micro_batches = self._micro_batches()
        counts = tuple(sum(self.workload.count(sample) for sample, _ in samples) for samples in micro_batches)
        update = self.step >= self.warmup_steps
        known = None if update else self.constraints.objective_weights()
        batches = (self.workload.batch(samples, self.execution.device) for samples in micro_batches)
        if self._captured is None:
            self._device_step.run(batches, counts, known, update)
        else:
            self._captured(*chain.from_iterable(batches), counts=counts, known=known, update=update)
        self._timed_samples += sum(map(len, micro_batches))
        if self.settings.constrained and (self.step + 1) % self.steps_per_epoch == 0:
            self.constraints.epoch_end()

    def _step_on_buffers(self, *buffers: Tensor, counts: tuple[int, ...], **choices: Any) -> None:
        size = len(buffers) // len(counts)
        batches = (buffers[start : start + size] for start in range(0, len(buffers), size))
        self._device_step.run(batches, counts, **choices)

    def _micro_batches(self) -> list[list[tuple[int, int]]]:
        """Return this step's samples with their seeds, which are the same however the step is cut."""
        epoch, position = divmod(self.step, self.steps_per_epoch)
        seed, batch = self.settings.training.seed, self.settings.training.batch
        together = batch * self.settings.training.accumulate
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % _SEEDS)
        order = torch.randperm(self.workload.training_samples, generator=generator).tolist()
        first_seed = (seed + 1) * _SEED_SPACING + self.step * together
        chosen = [
            (sample, (first_seed + number) % _SEEDS)
            for number, sample in enumerate(order[position * together : (position + 1) * together])
        ]
        return [chosen[start : start + batch] for start in range(0, len(chosen), batch)]

    def _log_entry(self, seconds: float) -> dict[str, Any]:
        losses = (self._logged_sums[:-1] / self._logged_sums[-1]).tolist()
        self._logged_sums.zero_()
        self._check_finite("training losses", losses)
        samples, self._timed_samples = self._timed_samples, 0
        entry: dict[str, Any] = {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            "loss": losses,
            "lr": self._rate(),
            f"{self.task.SAMPLES}_per_second": samples / seconds,
        }
        if self._measured:
            entry["weights"] = self.constraints.weights().tolist()
        if self.settings.constrained:
            entry["multipliers"] = self.constraints.multipliers.tolist()
            if (pressing := self.constraints.bound_multipliers) is not None:
                entry["bound_multipliers"] = pressing.tolist()
            entry["slacks"] = self.constraints.slacks.tolist()
            entry["skipped_updates"] = int(self.constraints.skipped_updates)
        return entry

    def _check_finite(self, what: str, numbers: list[float]) -> None:
        if all(map(math.isfinite, numbers)):
            return
        kept = "; the checkpoint is from before and is kept" if self.folder.checkpoint.exists() else ""
        raise InputError(
            f"{self.folder.path}: the {what} are no longer finite at step {self.step}{kept}; train again with a lower "
            f"--lr (it was {self.workload.lr:g})"
        )

    def _summary(self, losses: list[float]) -> str:
        shown = "loss by depth " + " ".join(f"{loss:.3g}" for loss in losses)
        found = f"; {self.constraints.report(losses)}" if self.settings.constrained else ""
        return (shown + found).partition("; the ")[0]

    def _validate(self) -> dict[str, Any]:
        """Validate, and keep the model if it is the best so far; InputError: losses that no training goes on from."""
        self.model.eval()
        try:
            losses = self.workload.validation_losses(self.execution.autocast)
            error = self.workload.validation_error(self.execution.autocast)
        finally:
            self.model.train()
        if self.step == 0:
            self._check_start(losses)
        self._check_finite("validation losses", losses)
        found = self.constraints.report(losses).as_dict()  # without numbers that JSON cannot represent
        entry = {"loss": losses, **{name: found[name] for name in ("feasible", "worst_layer", "worst_violation")}}
        entry |= {} if error is None else {"error": error}
        if self.best is None or self._is_better(entry, self.best):
            untrained = losses[-1] if self.best is None else self.best.get("untrained_loss")
            self.best = {"step": self.step, "untrained_loss": untrained, **entry}
            # Before the model, so that one of a step whose checkpoint never came is known by it.
            write_json(self.folder.in_place().kept, self.step)
            self.workload.save_model(self.folder.model)
        return entry

    def _check_start(self, losses: list[float]) -> None:
        """Refuse untrained losses that are hopeless; warn of those that are worse than the input or a guess."""
        first, last, guess = losses[0], losses[-1], self.workload.guess_loss
        defaults = type(self.settings)().values()
        changed = [
            f"{name} {value}"
            for name, value in self.settings.values().items()
            if name.startswith(("[data]", "[model]"))
            and name.split()[1] not in ("source", "download")
            and value != defaults[name]
        ]
        problem = f"the untrained network's loss at the last depth is {last:.4g} where that of its input is {first:.4g}"
        problem += f"; change what differs from the defaults: {', '.join(changed)}" * bool(changed)
        if not all(map(math.isfinite, losses)) or (guess is None and last > _HOPELESS * first):
            raise InputError(f"{self.folder.path}: {problem}")
        if last > _SCATTER * max(first, guess or 0.0):
            print(printable(f"cdt-fast: warning: {problem}"), file=sys.stderr)

    def _is_better(self, entry: dict[str, Any], best: dict[str, Any]) -> bool:
        """Return whether the error is lower than the best one's, among equally feasible models, or else the merit, both
        by the references that are known now. Better than an untrained network is a lower objective alone, too: it does
        nothing, and so violates little."""
        if "error" in entry:
            report, constrained = self.constraints.report, self.settings.constrained
            feasible, was = (constrained and report(one["loss"]).feasible for one in (entry, best))
            lower = entry["error"] < best.get("error", math.inf)
            return lower if best["step"] == 0 or feasible == was else feasible
        prices = {self.settings.constrained, self.settings.constrained and best["step"] > 0}
        merit = self.constraints.merit
        return any(merit(entry["loss"], priced=priced) < merit(best["loss"], priced=priced) for priced in prices)

    def _save_checkpoint(self) -> None:
        # The losses of a step are from before its update, which may be what broke the weights.
        weights = torch.stack([weight.detach().abs().max() for weight in self.model.parameters() if weight.numel()])
        self._check_finite("weights", weights.tolist())
        save_checkpoint(self.folder.in_place().checkpoint, self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the rest of the run depends on, for `checkpoint.save_checkpoint`."""
        return {
            "step": self.step,
            "steps": self.workload.steps,
            "warmup_steps": self.warmup_steps,
            "run": run_identity(self.settings),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "constraints": self.constraints.state_dict(),
            "best": self.best,
            "gammas": list(self.settings.evaluation.gammas),
            "logged_sums": self._logged_sums,
            "data": self._identity,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from the state of a checkpoint; InputError: it belongs to other settings or other data."""
        path, step, steps = self.folder.checkpoint, state["step"], self.workload.steps
        if step > steps:
            raise InputError(f"{path}: is at step {step}, and the training has {steps}")
        check_data(state, self._identity, self.settings.data.source, self.task.SAMPLES, self.folder.path)
        try:
            self.model.load_state_dict(state["model"])
            load_optimizer_state(self.optimizer, state["optimizer"])
            self.constraints.load_state_dict(state["constraints"])
            self._logged_sums.copy_(state["logged_sums"])
            torch.set_rng_state(state["random"])
            if state["random_cuda"]:
                torch.cuda.set_rng_state_all(state["random_cuda"])
            if state.get("gammas", here := self.settings.evaluation.gammas) != here:
                state["best"].pop("error", None)  # of other noise
            self.step, self.best = step, state["best"]
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"{path}: does not fit config.toml ({error})") from error
