"""with_descent(SFTTrainer) against the loop written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cdt_fast import InputError, with_descent
from tests.integrations.integration_cases import (
    ASCENT,
    LEARNING_RATE,
    SETTINGS,
    assert_same_weights,
    eager_losses,
    evaluated,
    expected_run,
    in_order,
    language_model,
    logged,
    rows,
    stacked,
)
from tests.models.layer_loss_cases import adapted, build

trl: Any = pytest.importorskip("trl", reason="the package 'trl' is not installed")
datasets: Any = pytest.importorskip("datasets", reason="the package 'datasets' is not installed")


def trainer_for(folder: Path, **changes: Any) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    model = changes.pop("model", None) or language_model()
    entries = [{name: row[name].tolist() for name in ("input_ids", "labels")} for row in rows()]
    data = datasets.Dataset.from_list(entries)
    settings = {**SETTINGS, "bf16": False, "max_steps": 4, "gradient_checkpointing": False}
    settings |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "per_device_eval_batch_size": 8}
    plain = in_order(trl.SFTTrainer)
    kind, given = (plain, {}) if changes.pop("plain", False) else (with_descent(plain), {"constraints": ASCENT})
    return kind(
        model=model,
        args=trl.SFTConfig(str(folder), **{**settings, **changes}),
        processing_class=tokenizer,
        train_dataset=data,
        eval_dataset=data,
        optimizers=(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), None),
        **given,
    )


# A low-rank adapter on the head SFTTrainer refuses by itself.
COPIED_HEAD = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize("kind", ["plain", "checkpointing", "a copy of the head"])
def test_it_is_the_loop_written_out(kind: str, tmp_path: Path) -> None:
    model, other = (adapted(language_model(), **COPIED_HEAD) if "copy" in kind else language_model() for _ in range(2))
    trainer = trainer_for(tmp_path, model=model, gradient_checkpointing=kind == "checkpointing")
    trainer.train()
    multipliers, losses, weights = expected_run([[0, 1], [2, 3], [4, 5], [6, 7]], model=other)
    torch.testing.assert_close(logged(trainer), losses, rtol=0, atol=1e-6)
    torch.testing.assert_close(trainer.constraints.multipliers, multipliers[-1], rtol=0, atol=1e-7)
    assert_same_weights(trainer.model, weights)
    torch.testing.assert_close(evaluated(trainer), eager_losses(other, stacked(rows())).detach(), rtol=0, atol=1e-6)
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert any("lm_head" in name for name in trained)


@pytest.mark.parametrize("factor", [None, 2.0])
def test_the_loss_of_the_routers_is_that_of_the_plain_trainer(factor: float | None, tmp_path: Path) -> None:
    changes: dict[str, Any] = {} if factor is None else {"router_aux_loss_coef": factor}
    if not hasattr(trl.SFTConfig, "router_aux_loss_coef"):
        pytest.skip(f"TRL {trl.__version__} leaves the factor to the model")
    found = []
    for plain in (True, False):
        model = build("mixtral", router_aux_loss_coef=5.0)
        changes |= {"model": model, "max_steps": 1, "max_grad_norm": 1e9}
        trainer = trainer_for(tmp_path, plain=plain, **changes)
        trainer.train()  # of one step: no multiplier has moved in it
        (entry, *_), metrics = trainer.state.log_history, trainer.evaluate()
        found.append((entry["grad_norm"], entry["loss"], metrics["eval_loss"]))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_another_loss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="loss_type"):
        trainer_for(tmp_path, loss_type="dft")
    with pytest.raises(InputError, match="DPOTrainer"):
        with_descent(trl.DPOTrainer)
