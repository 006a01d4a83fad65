"""Descent constraints as a callback of Lightning."""

import copy
import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.checks import InputError, check_integer, require
from cdt_fast.constraints.constraints import DescentConstraints
from cdt_fast.integrations.shared import LossSums, constraints_for, items_in, mean_over_ranks, measured, sum_over_ranks
from cdt_fast.models.layer_losses import LayerLosses, attach_layer_losses

try:
    _Callback: Any = importlib.import_module("lightning.pytorch").Callback
except ImportError:  # so that the class can be imported; its constructor says what is missing
    _Callback = object


class DescentCallback(_Callback):
    """Descent constraints for a transformers model inside of a LightningModule.

    The training step returns the loss of that model, called with `labels=`; one without it, or with several, is
    refused. The model's loss is the Lagrangian of `with_descent`, over all micro-batches of an optimizer step and all
    ranks, however unequal their numbers of items. As the whole number is not known before the last micro-batch, a loss
    is divided by the items of a micro-batch of the previous step, and one factor corrects the gradients just before
    they are clipped and the optimizer steps. Other terms of the loss are scaled by that factor too, which is near 1.

    Multipliers and slacks move as there (and not in a step whose training steps all return None), and the same entries
    are logged every `log_every_n_steps`. In validation, as wherever no training batch runs, the model's output has the
    loss of its last layer, and `layer_losses` and `layer_loss_count` to log. The checkpoint holds the state of the
    constraints. The model is given back as it was when the trainer is done.

    Args:
        constraints: a DescentConstraints, or a dictionary of its options, which a `preset` in it completes.
        unconstrained_steps, taps: as for `with_descent`.
        model: the name of the transformers model inside of the LightningModule.

    MissingExtra: lightning is not installed. InputError: from the start of training: there is no such model, or
    `attach_layer_losses` does not take it; the constraints do not fit it; the module optimizes manually, has several
    optimizers, or runs under DeepSpeed.
    """

    def __init__(
        self,
        constraints: DescentConstraints | Mapping[str, Any],
        *,
        unconstrained_steps: int = 0,
        taps: Sequence[int] | None = None,
        model: str = "model",
    ) -> None:
        require("lightning.pytorch", "lightning", "DescentCallback")
        super().__init__()
        self._given, self._model_name, self._taps = constraints, model, taps
        self._unconstrained_steps = check_integer("unconstrained_steps", unconstrained_steps, 0)
        self._constraints: DescentConstraints | None = None
        self._layer_losses: LayerLosses | None = None
        self._hooks: list[Any] = []
        self._saved: Mapping[str, Any] = {}
        self._logged: LossSums | None = None
        self._items: Tensor | None = None  # what a micro-batch is divided by: items of the previous step, a micro-batch
        # Losses and counts of the micro-batches whose gradients wait for the optimizer, and how many gradients wait.
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._backwards = 0
        self._in_batch = False  # of training: not in a validation, nor in the steps of a learning rate finder

    @property
    def constraints(self) -> DescentConstraints:
        """Return the constraints; before training starts there are none, which is an InputError."""
        if self._constraints is None:
            where = "(by ddp_spawn and ddp_notebook in processes that end with it)"
            raise InputError(f"the constraints are made when training starts {where}; there is no model before")
        return self._constraints

    @property
    def layer_losses(self) -> LayerLosses:
        """Return the handle of `attach_layer_losses`; it is an InputError unless the trainer runs."""
        if self._layer_losses is None:
            raise InputError("the layer losses are attached while the trainer runs, not before or after")
        return self._layer_losses

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise InputError(
                f"descent constraints need automatic optimization with one optimizer, got automatic_optimization = "
                f"{pl_module.automatic_optimization} and {len(trainer.optimizers)} optimizers"
            )
        if type(trainer.strategy).__name__.startswith("DeepSpeed"):
            raise InputError("descent constraints do not go with DeepSpeed; use strategy='ddp' or FSDP2")
        try:
            model = pl_module.get_submodule(self._model_name)
        except AttributeError as error:
            raise InputError(
                f"model must name the transformers model inside of the {type(pl_module).__name__}, got "
                f"{self._model_name!r}; it holds {[name for name, _ in pl_module.named_children()]}"
            ) from error
        if held := [name for name, value in pl_module.hparams.items() if isinstance(value, nn.Module)]:
            raise InputError(f"checkpoints cannot hold a model with layer losses: save_hyperparameters(ignore={held})")
        self._layer_losses = handle = attach_layer_losses(model, self._taps)
        given = self._constraints or self._given
        self._constraints = constraints_for(given, handle, self._unconstrained_steps).to(pl_module.device)
        self._logged = LossSums(self._constraints, handle.taps)
        after = functools.partial(self._after_optimizer_step, trainer, pl_module)
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
            trainer.optimizers[0].register_step_post_hook(after),
        ]
        self.load_state_dict(self._saved)
        self.on_before_zero_grad()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown()  # which the trainer does not call then

    def teardown(self, *_: Any, stage: str = "") -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._saved, self._in_batch = [], {}, False
        if self._layer_losses is not None:
            self._layer_losses.remove()
        self._layer_losses = None

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Not `module.training`: pretrained models come in evaluation mode, in which Lightning trains them.
        training = self._in_batch and torch.is_grad_enabled()
        self.layer_losses.weights = self.constraints.weights() if training else None
        if kwargs.get("labels") is None and kwargs.get("shift_labels") is None:
            return args, kwargs
        items = items_in(self.layer_losses, kwargs)
        if training and self._items is None:
            self._items = mean_over_ranks(items.to(self.constraints.device))
        self.layer_losses.items = self._items if training else items.clamp(min=1)
        kwargs = {**kwargs, "num_items_in_batch": None}
        return args, {**kwargs, "return_dict": True} if training else kwargs

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.layer_losses.weights = self.layer_losses.items = None
        if self._in_batch and "layer_losses" in output and output["loss"].requires_grad:
            losses = measured(self.layer_losses, self.constraints)
            # In the backward: a training step may look at a loss, and return None.
            output["loss"].register_hook(lambda gradient: self._pending.append(losses))

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._backwards += 1

    def on_before_zero_grad(self, *_: Any) -> None:
        # Between the first forward of a step and its backward. An epoch that a hook ends leaves gradients behind.
        self._pending.clear()
        self._backwards = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # Not at the end of an epoch: a checkpoint may have been saved before that, after the last validation.
        if batch_idx == 0:
            self.constraints.epoch_end()
        self._in_batch = True

    def on_train_batch_end(self, *_: Any) -> None:
        self._in_batch = False

    on_train_epoch_end = on_train_batch_end  # a batch that the module refuses has no end

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        # The only hook between the last backward of an optimizer step and the clipping of its gradients, which AMP has
        # unscaled by now.
        if not self._backwards:
            return  # every training step returned None
        if self._items is None or not 0 < len(self._pending) <= self._backwards:
            raise InputError(
                f"training_step must return one loss of {self._model_name!r}, called with labels= (its output.loss, "
                f"also times a factor or plus other terms): for this optimizer step it returned {self._backwards}, in "
                f"which there are {len(self._pending)} of the model"
            )
        # Each micro-batch was divided by `items` and by their number, and the ranks were averaged.
        parts = trainer.accumulate_grad_batches * trainer.world_size
        counts = torch.stack([count for _, count in self._pending])
        total, forwards = sum_over_ranks(torch.stack([counts, torch.ones_like(counts)]).sum(1)).clamp(min=1)
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is not None:
                parameter.grad.mul_((parts * self._items / total).to(parameter.grad.dtype))
        self._items = total / forwards  # where an epoch ends inside of a step there are fewer than `parts`

    def _after_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any, *_: Any) -> None:
        # Not called where a gradient scaler skips the step, but of a fused optimizer, which it tells to skip by itself.
        found_inf = getattr(optimizer, "found_inf", None)
        if self._pending and not (found_inf is not None and found_inf.item()):
            assert self._logged is not None
            for losses, count in self._pending:
                self._logged.add(losses, count)
                self.constraints.record(losses, count)
            self.constraints.step(update=trainer.global_step >= self._unconstrained_steps)
            if trainer.log_every_n_steps and (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
                pl_module.log_dict(self._logged.take(multipliers=True)[0])
        self.on_before_zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, plain numbers and words; nothing before training has started."""
        if self._constraints is None or self._items is None:
            return {}
        return {"constraints": copy.deepcopy(self._constraints.state_dict()), "items": self._items.clone()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, when training starts; at once where it has: FSDP restores after that."""
        if self._layer_losses is None:
            self._saved = state_dict
        elif state_dict:
            self.constraints.load_state_dict(state_dict["constraints"])
            self._items = state_dict["items"].to(self.constraints.device)
