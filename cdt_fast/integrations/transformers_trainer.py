"""transformers' Trainer and TRL's SFTTrainer with descent constraints."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cdt_fast.checks import InputError, check_integer, require
from cdt_fast.constraints.constraints import DescentConstraints
from cdt_fast.integrations.shared import LossSums, constraints_for, items_in, mean_over_ranks, measured
from cdt_fast.models.layer_losses import LayerLosses, attach_layer_losses
from cdt_fast.models.layer_losses.outputs import FIELDS
from cdt_fast.training.checkpoint import load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback
else:
    Trainer = object  # `with_descent` mixes the methods below into a class that it is given

STATE_FILE = "descent_constraints.safetensors"


def with_descent(trainer_class: Any) -> Any:
    """Return a subclass of transformers' Trainer, or of TRL's SFTTrainer, that trains under descent constraints.

    It takes three more keyword arguments, all others as before:

        constraints   a DescentConstraints, or a dictionary of its options, which a `preset` in it completes
        unconstrained_steps  optimizer steps at the start with the constraints off (the paper: those of one epoch)
        taps          as for `attach_layer_losses`

    and has two more attributes, `constraints` and `layer_losses` (the handle of `attach_layer_losses`).

    In training the loss is the Lagrangian `Σ_l w_l ℓ_l`, where ℓ_l is the mean over all items (tokens or rows whose
    label is not −100) of an optimizer step: of its micro-batches and, whatever `average_tokens_across_devices` says,
    of all ranks. Multipliers move once an optimizer step, unless a gradient scaler skips it; slacks restart each epoch.
    Whenever the Trainer logs its loss, it also logs, for each depth d that is read, `layer_loss_d` (in nats, the mean
    since the last log, over all ranks), `multiplier_d`, `violation_d` (where there is a constraint), and `feasible` (1
    or 0); with bounds also `bound_multiplier_d` and `bound_violation_d`. Checkpoints hold the state of the constraints,
    and `resume_from_checkpoint` continues it.

    In evaluation the loss is that of the last layer; further metrics are `eval_layer_loss_d`, `eval_violation_d` and
    `eval_feasible`, from sums over all ranks. (Where the ranks do not divide the data set, samplers repeat a few rows,
    and those count again.) Logits are not computed in training, so that TRL's entropy and token accuracy are missing.

    MissingExtra: transformers is not installed. InputError: it is another class, or a subclass that computes another
    loss. From the constructor: the model is none that `attach_layer_losses` takes; the constraints do not fit it; a
    setting asks for another loss (label smoothing, `compute_loss_func`), for another way to distribute (DataParallel,
    DeepSpeed, sequences split over devices), or for new models (`model_init`).

    Source: "A Constrained Optimization Perspective of Unrolled Transformers", the Lagrangian of a classifier's layers.
    """
    base = require("transformers", "transformers", "with_descent").Trainer
    if not isinstance(trainer_class, type) or not issubclass(trainer_class, base):
        raise InputError(f"trainer_class must be a subclass of transformers' Trainer, got {trainer_class!r}")
    owner = next(ancestor for ancestor in trainer_class.__mro__ if "compute_loss" in vars(ancestor))
    of_trl = owner.__name__ == "SFTTrainer" and owner.__module__.startswith("trl.")
    if owner is not base and not of_trl and not issubclass(owner, _DescentTrainer):
        raise InputError(
            f"trainer_class must train with the loss of its model, but {owner.__name__} has a compute_loss of its own; "
            "supported are transformers' Trainer, TRL's SFTTrainer and subclasses that leave compute_loss alone"
        )
    return type(f"Descent{trainer_class.__name__}", (_DescentTrainer, trainer_class), {"__doc__": with_descent.__doc__})


class _DescentTrainer(Trainer):
    """The methods that `with_descent` adds."""

    layer_losses: LayerLosses
    constraints: DescentConstraints
    _items: Tensor | None = None  # of an optimizer step, over all ranks, divided by their number
    _evaluated: LossSums | None = None

    def __init__(
        self,
        *args: Any,
        constraints: DescentConstraints | Mapping[str, Any],
        unconstrained_steps: int = 0,
        taps: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._check_supported()
        self._unconstrained_steps = check_integer("unconstrained_steps", unconstrained_steps, 0)
        # Now that TRL has put its own forward in the place of the model's: that one passes on what is not for it.
        self.layer_losses = attach_layer_losses(self.model, taps)
        try:
            made = constraints_for(constraints, self.layer_losses, self._unconstrained_steps)
            self.constraints = made.to(self.args.device)
        except Exception:
            self.layer_losses.remove()  # so that another trainer can have the model
            raise
        self._logged = LossSums(self.constraints, self.layer_losses.taps)
        self._entries: dict[str, float] = {}
        # The mean over the micro-batches and not their sum, in newer versions of TRL.
        names = inspect.unwrap(super().compute_loss).__code__.co_names
        self._divides_router_loss = "current_gradient_accumulation_steps" in names
        self._pending: list[tuple[Tensor, Tensor]] = []  # losses and counts of the micro-batches of this optimizer step
        # Every version then gives compute_loss what get_batch_samples counted, and does not divide its result again.
        self.model_accepts_loss_kwargs = True
        self.add_callback(_stepper(self))

    def _check_supported(self) -> None:
        args: Any = self.args
        parallelism: Any = getattr(self.accelerator, "parallelism_config", None)
        split = any(getattr(parallelism, name, False) for name in ("cp_enabled", "sp_enabled"))
        loss_type = getattr(args, "loss_type", "nll")  # some versions of TRL set compute_loss_func for it
        # Of a metric whose name does not end in "loss" transformers takes the greatest.
        greatest = args.greater_is_better and re.search("layer_loss_|violation_", str(args.metric_for_best_model))
        problems = (
            (args.label_smoothing_factor, "label_smoothing_factor", "a loss of its own: set it to 0"),
            ("nll" not in loss_type, "loss_type", "a loss of its own: use 'nll'"),
            (self.compute_loss_func is not None, "compute_loss_func", "a loss of its own: leave it out"),
            (self.model_init is not None, "model_init", "new models during training: give one model"),
            (args.use_liger_kernel, "use_liger_kernel", "a forward of its own: leave it out"),
            (args.n_gpu > 1, "n_gpu", "DataParallel: start with torchrun or accelerate launch"),
            (self.is_deepspeed_enabled, "deepspeed", "DeepSpeed: use DDP or FSDP2"),
            (split, "parallelism_config", "sequences split over devices: use whole ones"),
            (greatest, "greater_is_better", f"the greatest {args.metric_for_best_model}: set it to False"),
        )
        for given, name, problem in problems:
            if given:
                raise InputError(f"descent constraints do not go with {name}, which asks for {problem}")

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples, _ = super().get_batch_samples(*args, **kwargs)
        if self._pending:  # data without a length ended inside of a step, whose gradients wait
            model: Any = self.model
            model.zero_grad()
        self._items, self._pending = None, []
        if samples:
            items = torch.stack([items_in(self.layer_losses, batch).to(self.args.device) for batch in samples]).sum()
            # A step without a label that counts is left with gradients of zero, and its losses of 0/0 do not move the
            # multipliers.
            self._items = mean_over_ranks(items)
        return samples, self._items

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        # Not num_items_in_batch: some versions count it and do not hand it on.
        counted = self._items if model.training else items_in(self.layer_losses, inputs).clamp(min=1)
        self.layer_losses.items = counted
        self.layer_losses.weights = self.constraints.weights() if model.training else None
        # Of TRL, which also changes the configuration, where models do not look again, and which divides it.
        factor = getattr(self, "router_aux_loss_coef", None)
        if factor is not None and self._divides_router_loss and num_items_in_batch is not None:
            factor /= self.current_gradient_accumulation_steps
        self.layer_losses.router_factor = factor
        try:
            output = model(**{**inputs, "return_dict": True})
        finally:  # outside of the trainer's own forwards the model's loss stays its own
            self.layer_losses.weights = self.layer_losses.router_factor = self.layer_losses.items = None
        losses = measured(self.layer_losses, self.constraints)
        if model.training:
            self._pending.append(losses)
            self._logged.add(*losses)
        elif self._evaluated is not None:
            self._evaluated.add(*losses)
        return (output["loss"], output) if return_outputs else output["loss"]

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        # A list that is given stands in the place of the configuration's.
        ignored = None if ignore_keys is None else [*ignore_keys, *FIELDS]
        return super().prediction_step(model, inputs, prediction_loss_only, ignored)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            self._entries, count = self._logged.take(multipliers=True)
            if not count:
                raise InputError(
                    f"no label counted since step {self._globalstep_last_logged}: all are -100. Look at what masks "
                    "them (the prompt, a maximal length, a template that is not recognized)"
                )
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs.update(self._entries)
            self._entries = {}
        super().log(logs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        self._evaluated = LossSums(self.constraints, self.layer_losses.taps)
        try:
            output: Any = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
            entries, count = self._evaluated.take(f"{metric_key_prefix}_")
        finally:
            self._evaluated = None
        if count:
            output.metrics.update(entries)
        return output

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            save_checkpoint(os.path.join(output_dir, STATE_FILE), self.constraints.state_dict())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.constraints.load_state_dict(load_checkpoint(os.path.join(checkpoint, STATE_FILE)))


def _stepper(trainer: _DescentTrainer) -> TrainerCallback:
    """Return a callback that steps the multipliers after the optimizer, before the Trainer logs or saves."""
    from transformers import TrainerCallback

    class DescentStepper(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            # Without the losses of a training before this one.
            trainer._logged = LossSums(trainer.constraints, trainer.layer_losses.taps)

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            if not trainer.accelerator.optimizer_step_was_skipped:  # where a gradient scaler found an infinity
                for losses, count in trainer._pending:
                    trainer.constraints.record(losses, count)
                trainer.constraints.step(update=trainer.state.global_step >= trainer._unconstrained_steps)
            trainer._pending = []

        def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
            trainer.constraints.epoch_end()

        def on_epoch_begin(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            # A checkpoint after the last step of an epoch is saved before on_epoch_end, which a resumed run does not
            # call. The epoch is a whole number then, and it is not where a run goes on inside of an epoch.
            if float(state.epoch or 0).is_integer():
                trainer.constraints.epoch_end()

    return DescentStepper()
