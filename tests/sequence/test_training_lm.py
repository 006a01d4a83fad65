"""`train lm`: the loop on instructions, what it leaves, and what an evaluation of it says."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from cdt_fast.checks import InputError
from cdt_fast.files import read_json
from cdt_fast.sequence.evaluation import measure
from cdt_fast.sequence.networks import PretrainedNetwork
from cdt_fast.sequence.tokenizers import encoded_instructions
from cdt_fast.training.checkpoint import load_checkpoint
from cdt_fast.training.run_folder import RunFolder
from tests.runs import Call, assert_same_runs, evaluated, load_data, new_trainer, settings_of, trained
from tests.tiny import words_of_command
from tests.tiny_text import TINY_LANGUAGE, write_instructions, write_language_model
from tests.training.training_cases import signal_after

transformers = pytest.importorskip("transformers")


def settings_for(source: Path, **changes: Any) -> Any:
    options = {name: changes.pop(name) for name in ("layers", "tied") if name in changes}
    model = changes.pop("model", None) or write_language_model(source.parent / "llama", **options)
    return settings_of("lm", TINY_LANGUAGE, source, model=str(model), **changes)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_instructions(tmp_path / "alpaca.json")


def test_training_lowers_the_loss_and_a_constrained_run_becomes_feasible(source: Path, tmp_path: Path) -> None:
    config = settings_for(source, steps=80, validate_every=40)
    run = trained(config, tmp_path / "run")
    held_out = [entry["validation"]["loss"] for entry in run.read_metrics() if "validation" in entry]
    assert held_out[-1][-1] < 0.6 * math.log(258)
    evaluation = evaluated(run, config)
    assert evaluation["feasible"]
    assert max(evaluation["layer_ratio"][1:]) < 0.95
    assert evaluation["accuracy"][0] > 0.2


def test_the_held_out_losses_are_those_of_an_eager_loop_over_answers(source: Path, tmp_path: Path) -> None:
    """Prompt masked, end token predicted, every tap through the final norm and the head, by transformers alone."""
    config = settings_for(source, layers=4, taps=[0, 2, 4], steps=6)
    run = trained(config, tmp_path / "run")
    evaluation = evaluated(run, config)
    model = transformers.AutoModelForCausalLM.from_pretrained(run.model).double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.model)
    sums, ratios, right, count = torch.zeros(3, dtype=torch.float64), [], 0, 0
    for entry in load_data(config).test:
        prompt = tokenizer(entry.prompt)["input_ids"]
        ids = torch.tensor([[*prompt, *tokenizer(entry.output)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            output = model(ids, output_hidden_states=True)
        # The last of transformers' hidden states is normed already.
        states = [model.model.norm(state) for state in output.hidden_states[:-1]] + [output.hidden_states[-1]]
        answer = ids[0, len(prompt) :]
        logits = torch.stack([model.lm_head(state)[0, len(prompt) - 1 : -1] for state in states[::2]])
        losses = torch.nn.functional.cross_entropy(logits.mT, answer.expand(3, -1), reduction="none").sum(1).detach()
        sums += losses
        ratios += (losses[1:] / losses[:-1]).tolist()
        right += int((output.logits[0, len(prompt) - 1 : -1].argmax(-1) == answer).sum())
        count += len(answer)
    assert evaluation["answers"] == count
    assert evaluation["report"]["depths"] == [0, 2, 4]
    assert evaluation["layers"] + 1 == len(evaluation["depth_accuracy"][0]) == 3
    assert evaluation["layer_loss"] == pytest.approx((sums / count).tolist(), rel=1e-5)
    assert evaluation["accuracy"][0] == pytest.approx(right / count)
    assert evaluation["per_sample"]["mean_ratio"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-5)


def test_what_is_left_out_of_the_training_is_in_no_epoch(tmp_path: Path) -> None:
    entries = [{"instruction": "Say it. " * (1 + n % 2 * 99) + f"{n}", "output": "word"} for n in range(40)]
    (tmp_path / "alpaca.json").write_text(json.dumps(entries), encoding="utf-8")
    config = settings_for(tmp_path / "alpaca.json", batch=4, steps="none", epochs=3)
    config.constraints.warmup_epochs = 1
    run = trained(config, tmp_path / "run")
    steps = load_checkpoint(run.checkpoint)["steps"]
    assert evaluated(run, config)["warmup_steps"] == steps // 3 < len(load_data(config).train) // 4


def test_a_validation_is_the_evaluation_of_its_answers_at_the_training_noise(tmp_path: Path) -> None:
    entries = [{"instruction": f"Say it {n}.", "input": "", "output": "word" * (n % 7 + 1)} for n in range(40)]
    (tmp_path / "alpaca.json").write_text(json.dumps(entries), encoding="utf-8")
    config = settings_for(tmp_path / "alpaca.json", gamma=0.3, batch=2)
    workload: Any = new_trainer(RunFolder.create(tmp_path / "run", config), config).workload
    counts = workload.validation.counts  # of the answers, by which sequences weigh, and which their lengths follow
    assert counts != sorted(counts, reverse=True)
    expected = measure(workload.network, workload.validation, config, False)["layer_loss"]
    assert workload.validation_losses(None) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("changes", [{}, {"layers": 5, "taps": [0, 3, 5]}, {"tied": True}])
def test_the_losses_of_a_step_and_their_gradient_are_those_of_an_eager_loop(
    source: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """A step as the loop takes it, against logits of every depth: in float32, and in float64 for what is true."""
    config = settings_for(source, **changes)
    trainer = new_trainer(RunFolder.create(tmp_path / "run", config), config)
    inputs, targets, seeds = trainer.workload.batch(trainer._micro_batches()[0], torch.device("cpu"))
    assert len({int(length) for length in inputs[1].sum(-1)}) > 1  # unequal lengths, so that there is padding
    trainer.workload.save_model(trainer.folder.model)
    weights = torch.linspace(-0.5, 1.5, trainer.workload.num_constraints + 1)
    total, losses = trainer.losses(inputs, targets, seeds, weights)
    total.backward()
    for dtype in (torch.float32, torch.float64):
        model = transformers.AutoModelForCausalLM.from_pretrained(trainer.folder.model, dtype=dtype).train()
        output = model(input_ids=inputs[0], attention_mask=inputs[1], output_hidden_states=True)
        # The last of transformers' hidden states is normed already.
        states = [*map(model.model.norm, output.hidden_states[:-1]), output.hidden_states[-1]]
        depths = range(len(states)) if config.model.taps is None else config.model.taps
        logits = [model.lm_head(states[depth])[:, :-1].mT for depth in depths]
        expected = torch.stack([torch.nn.functional.cross_entropy(each, targets[:, 1:]) for each in logits])
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0, check_dtype=False)
        (weights.to(dtype) * expected).sum().backward()
        for (name, right), found in zip(model.named_parameters(), trainer.model.parameters(), strict=True):
            assert right.grad is not None, name
            assert found.grad is not None, name
            error = (found.grad - right.grad).abs().max()
            assert error <= 1e-5 * right.grad.abs().max(), (name, dtype)


def test_the_losses_of_the_parts_are_those_of_the_batch(source: Path, tmp_path: Path) -> None:
    """The noise of a sample is its own, and it weighs by its answer, however a step is cut into micro-batches."""
    config = settings_for(source, batch=5, gamma=0.5)
    trainer = new_trainer(RunFolder.create(tmp_path / "run", config), config)
    trainer.model.double()
    weights = torch.ones(trainer.workload.num_constraints + 1, dtype=torch.float64)
    batch = trainer._micro_batches()[0]
    assert len(batch) == 5

    def sums(chosen: list[tuple[int, int]]) -> torch.Tensor:
        count = sum(trainer.workload.count(sample) for sample, _ in chosen)
        return trainer.losses(*trainer.workload.batch(chosen, torch.device("cpu")), weights)[1].detach() * count

    expected = sums(batch)
    # The seeds of the samples decide, and the noise is there.
    assert (sums([(sample, number + 1) for sample, number in batch]) / expected - 1).abs().max() > 1e-5
    for parts in (2, 3, 5):  # with unequal counts
        found = sum(sums(batch[part::parts]) for part in range(parts))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def test_a_signal_and_resume_by_the_command_line_change_no_bit(source: Path, tmp_path: Path, call: Call) -> None:
    """Weights, multipliers, the optimizer's state, the kept model, what was logged, and the evaluation."""
    model = write_language_model(tmp_path / "llama")
    words = words_of_command(TINY_LANGUAGE, model=model, gamma=0.3, accumulate=2, batch=3)
    assert call("train", "lm", source, *words, "--out", tmp_path / "whole").status == 0
    whole, parts = (RunFolder(tmp_path / name) for name in ("whole", "in parts"))
    with signal_after(signal.SIGTERM, 6):
        answer = call("train", "lm", source, *words, "--out", parts.path)
    assert answer.status == 128 + signal.SIGTERM
    assert answer.err.splitlines()[-1] == (
        f"cdt-fast: stopped by SIGTERM after step 6; continue with: cdt-fast train lm --resume '{parts.path}'"
    )
    assert "resume it with cdt-fast train lm" in call("train", "video", "--resume", parts.path).line()
    assert call("train", "lm", "--resume", parts.path).status == 0
    assert_same_runs(parts, whole)
    assert read_json(whole.evaluation) == read_json(parts.evaluation)


def test_the_limits_of_a_language_model_are_told_before_training(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    write_language_model(folder)

    def start(positions: int) -> Any:
        sizes = {"vocab_size": 258, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": positions}
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, eos_token_id=0)).save_pretrained(folder)
        settings = settings_for(source, model=str(folder), max_tokens=256)
        return new_trainer(RunFolder(tmp_path / "run"), settings)

    longest = max(row.shape[1] for row in start(256).workload.train.rows)
    start(longest)
    with pytest.raises(InputError, match=rf"gpt2: cannot read rows of up to {longest} tokens.* smaller --max-tokens"):
        start(longest - 1)


def test_a_model_whose_tokens_are_their_own_targets_is_refused() -> None:
    sizes = {"d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 1, "decoder_ffn_dim": 8}
    model = transformers.BartForCausalLM(transformers.BartConfig(vocab_size=20, **sizes))
    with pytest.raises(InputError, match="BartForCausalLM: takes the label of a token as its own target"):
        PretrainedNetwork(model, None)


def test_long_sequences_are_cut_and_those_without_an_answer_left_out(source: Path, tmp_path: Path) -> None:
    entries = json.loads(source.read_text())
    for entry in entries[::2]:
        entry["instruction"] += " please" * 40
    entries.append({"instruction": "Say nothing.", "output": ""})
    source.write_text(json.dumps(entries))
    config = settings_for(source, steps=1)
    data = load_data(config)
    trainer = new_trainer(RunFolder.create(tmp_path / "run", config), config)
    short = [entry for entry in data.train if "please" not in entry.instruction]
    assert trainer.workload.training_samples == len(short) < len(data.train)
    workload: Any = trainer.workload
    everything = [entry for part in data[:3] for entry in part]
    left_out = f"within --max-tokens: {sum('please' in e.instruction for e in everything)} of {len(everything)}"
    assert "; 1 without an answer dropped\n" in workload.description
    assert workload.description.endswith(left_out)
    rows = encoded_instructions(everything, workload.network.tokenizer, config.data.max_tokens, "all").rows
    lengths = [row.shape[1] for row in rows]
    cut: Any = new_trainer(RunFolder(tmp_path / "cut"), settings_for(source, max_tokens=max(lengths) - 1)).workload
    told = f"answers cut short by --max-tokens: {lengths.count(max(lengths))} of {len(everything)}"
    assert cut.description == f"{workload.description}\n{told}"
    inputs, targets, _ = trainer.workload.batch([(0, 0), (1, 1)], torch.device("cpu"))
    assert inputs.shape[0] == 2
    assert inputs.shape[1:] == targets.shape
    counted = targets[0][targets[0] != -100].tolist()
    trainer.workload.save_model(trainer.folder.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(trainer.folder.model)
    assert tokenizer.decode(counted) == f"{short[0].output}{tokenizer.eos_token}"
    assert trainer.workload.count(0) == len(counted)
    with pytest.raises(InputError, match=r"train instructions.*all tokens are masked.*--max-tokens"):
        trained(settings_for(source, max_tokens=50), tmp_path / "masked")
