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
    evaluated,
    expected_run,
    in_order,
    language_model,
    logged,
    rows,
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


@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_is_the_loop_written_out(checkpointing: bool, tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, gradient_checkpointing=checkpointing)
    trainer.train()
    multipliers, losses, weights = expected_run([[0, 1], [2, 3], [4, 5], [6, 7]])
    torch.testing.assert_close(logged(trainer), losses, rtol=0, atol=1e-6)
    torch.testing.assert_close(trainer.constraints.multipliers, multipliers[-1], rtol=0, atol=1e-7)
    assert_same_weights(trainer.model, weights)
    after = expected_run([[0, 1], [2, 3], [4, 5], [6, 7], list(range(8))])[1][-1]
    torch.testing.assert_close(evaluated(trainer), after, rtol=0, atol=1e-6)


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


def test_a_copy_of_the_head_is_trained_as_the_loop_written_out_trains_it(tmp_path: Path) -> None:
    # A low-rank adapter on the head SFTTrainer refuses by itself.
    options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "task_type": "CAUSAL_LM"}
    trainer = trainer_for(tmp_path, model=adapted(language_model(), **options))
    trainer.train()
    multipliers, _, weights = expected_run([[0, 1], [2, 3], [4, 5], [6, 7]], model=adapted(language_model(), **options))
    torch.testing.assert_close(trainer.constraints.multipliers, multipliers[-1], rtol=0, atol=1e-7)
    assert_same_weights(trainer.model, weights)
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert any("lm_head" in name for name in trained)
