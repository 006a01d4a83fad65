"""A tiny language model, rows with unequal numbers of labels, and the training loop written out in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.models import layer_loss_cases

VOCABULARY, LAYERS, ROWS, LENGTH = 50, 2, 8, 6
RATE, REFERENCE = 0.3, 3.0
LEARNING_RATE, DUAL_LR = 0.1, 0.2
# Of a Trainer, which is that loop then.
SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 2}
SETTINGS |= {"gradient_accumulation_steps": 2, "lr_scheduler_type": "constant", "learning_rate": LEARNING_RATE}
SETTINGS |= {"use_cpu": True, "max_grad_norm": 0.0, "logging_steps": 1, "save_strategy": "no"}
SETTINGS |= {"report_to": [], "disable_tqdm": True}
# Of Lightning's trainer, the same.
LIGHTNING: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "accumulate_grad_batches": 2}
LIGHTNING |= {"log_every_n_steps": 1, "num_sanity_val_steps": 0, "logger": False, "enable_checkpointing": False}
LIGHTNING |= {"enable_progress_bar": False, "enable_model_summary": False}
# The chain by plain ascent on raw violations without slacks, which the loop below writes out.
ASCENT: dict[str, Any] = {"coupling": "chain", "reference_mode": "constraint", "rate": RATE, "reference": REFERENCE}
ASCENT |= {"betas": None, "dual_lr": DUAL_LR, "resilience": None, "normalize": False, "margin": 0.0}
stacked = torch.utils.data.default_collate  # rows as a batch


def language_model(dtype: torch.dtype = torch.float64) -> Any:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    sizes |= {"hidden_size": 16, "intermediate_size": 24, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)


def rows(count: int = ROWS) -> list[dict[str, Tensor]]:
    """Return rows; row i has i % 4 + 1 labels that count; that of the first token does not, as nothing predicts it."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(count):
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[1 : LENGTH - 1 - index % 4] = -100
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found


def eager_losses(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of each depth, `[3]`, differentiable."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
    return layer_loss_cases.eager_losses("llama", model, batch)


def expected_run(
    steps: Sequence[Sequence[int]], count: int = ROWS, model: Any = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Train on the rows of each step at once; multipliers and losses of every step, and the weights at the end."""
    model, data = model or language_model(), rows(count)
    multipliers, factor = [0.0] * (LAYERS + 1), 1 - RATE
    history, losses_of_steps = [], []
    for step in steps:
        losses = eager_losses(model, stacked([data[index] for index in step]))
        zero, one, two = multipliers
        lagrangian = (zero - factor * one) * losses[0] + (one - factor * two) * losses[1] + (1 + two) * losses[2]
        model.zero_grad()
        lagrangian.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter -= LEARNING_RATE * parameter.grad
        first, second, third = losses.tolist()
        violations = [first - REFERENCE, second - factor * first, third - factor * second]
        multipliers = [max(0.0, old + DUAL_LR * g) for old, g in zip(multipliers, violations, strict=True)]
        history.append(multipliers)
        losses_of_steps.append(losses.tolist())
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return torch.tensor(history, dtype=torch.float64), torch.tensor(losses_of_steps, dtype=torch.float64), weights


def assert_same_weights(model: nn.Module, expected: dict[str, Tensor], tolerance: float = 1e-7) -> None:
    # The model's norms compute in float32, whatever its dtype.
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=tolerance)


def in_order(kind: Any) -> Any:
    """Return a class of trainers that takes the rows in their order."""

    class InOrder(kind):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return InOrder


def logged(trainer: Any, name: str = "layer_loss") -> Tensor:
    """Return what a trainer logged by depth, `[logs, 3]`."""
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return torch.tensor([[entry[f"{name}_{depth}"] for depth in range(3)] for entry in entries], dtype=torch.float64)


def evaluated(trainer: Any) -> Tensor:
    """Return the losses by depth, `[3]`, of an evaluation."""
    metrics = trainer.evaluate()
    return torch.tensor([metrics[f"eval_layer_loss_{depth}"] for depth in range(3)], dtype=torch.float64)
