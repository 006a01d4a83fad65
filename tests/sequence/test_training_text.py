"""`train text`: the loop on labeled texts, what it leaves, and what an evaluation of it says."""

from __future__ import annotations

import functools
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cdt_fast.checks import InputError
from cdt_fast.files import read_json, write_json
from cdt_fast.models import TextUT
from cdt_fast.sequence import text
from cdt_fast.sequence.perturbation import perturbed
from cdt_fast.sequence.tokenizers import EncodedSamples
from cdt_fast.training import optimizer
from cdt_fast.training.interruption import Interrupted
from cdt_fast.training.run_folder import RunFolder
from tests.runs import assert_same_runs, evaluated, load_data, new_trainer, settings_of, train, trained
from tests.tiny_text import TINY_TEXT, reviews, write_table
from tests.training.training_cases import signal_after

transformers = pytest.importorskip("transformers")
ENCODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
ENCODER["max_position_embeddings"] = 24
settings_for = functools.partial(settings_of, "text", TINY_TEXT)


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny BERT of random weights and a tokenizer of the words of `reviews`."""
    folder = tmp_path_factory.mktemp("encoder")
    words = sorted({word for text, _ in reviews(200) for word in text.split()})
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=24).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=5 + len(words), **ENCODER)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def test_training_lowers_the_loss_and_a_constrained_run_becomes_feasible(tmp_path: Path) -> None:
    config = settings_for(write_table(tmp_path / "reviews.tsv", 160), steps=150, validate_every=50, gamma=0.1)
    run = trained(config, tmp_path / "run")
    held_out = [entry["validation"]["loss"] for entry in run.read_metrics() if "validation" in entry]
    assert held_out[-1][-1] < 0.3 < math.log(2) * 0.9
    evaluation = evaluated(run, config)
    assert evaluation["feasible"]
    assert evaluation["accuracy"][0] == 1.0
    assert max(evaluation["layer_ratio"][1:]) < 0.9
    # Noise of twice the embeddings' own size leaves less of them than none.
    assert evaluation["accuracy"][2] < evaluation["accuracy"][0]


@pytest.mark.parametrize(("precision", "narrow"), [("auto", True), ("bf16", True), ("fp32", False)])
def test_an_evaluation_has_the_products_of_the_training(
    tmp_path: Path, precision: str, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdt_fast.training.execution.cpu_has_bf16_products", lambda: True)
    config = settings_for(write_table(tmp_path / "reviews.tsv"), precision=precision, steps=1)
    run, seen, read = trained(config, tmp_path / "run"), set(), TextUT.depth_logits

    def noted(*arguments: Any, **options: Any) -> list[Tensor]:
        seen.add(torch.is_autocast_enabled("cpu"))
        return read(*arguments, **options)

    monkeypatch.setattr(TextUT, "depth_logits", noted)
    evaluated(run, config)
    assert seen == {narrow}


@pytest.mark.parametrize(("classes", "reference", "used"), [(2, 0.9, math.log(2)), (2, 0.5, 0.5), (3, 0.9, 0.9)])
def test_a_reference_is_at_most_the_loss_of_a_guess(
    tmp_path: Path, classes: int, reference: float, used: float
) -> None:
    """Above it the first layer is free: it may raise the loss of its input and keep its bound."""
    rows = [(text, label if number % 3 or classes == 2 else "new") for number, (text, label) in enumerate(reviews(80))]
    (tmp_path / "reviews.tsv").write_text("\n".join("\t".join(row) for row in [("text", "label"), *rows]))
    config = settings_for(tmp_path / "reviews.tsv", reference=reference)
    trainer = new_trainer(RunFolder.create(tmp_path / "run", config), config)
    assert trainer.constraints.options.reference == pytest.approx(used)
    said = [note for note in trainer.notes() if "is above the loss of a guess" in note]
    expected = f"note: --reference 0.9 is above the loss of a guess, {used:.4g}, which is used instead"
    assert said == [expected] * (used < reference)
    trainer.run(progress=False)
    evaluation = evaluated(trainer.folder, config)
    assert evaluation["violation"][1] == pytest.approx(evaluation["layer_loss"][1] - 0.9 * used)


def test_a_guess_knows_the_shares_of_the_classes(tmp_path: Path) -> None:
    rows = [(text, "pos" if number % 5 else "neg") for number, (text, _) in enumerate(reviews(200))]
    (tmp_path / "reviews.tsv").write_text("\n".join("\t".join(row) for row in [("text", "label"), *rows]))
    config = settings_for(tmp_path / "reviews.tsv", steps=40, test=0.4)
    trainer = new_trainer(RunFolder.create(tmp_path / "run", config), config)
    expected = -0.2 * math.log(0.2) - 0.8 * math.log(0.8)
    assert trainer.constraints.options.reference == pytest.approx(expected, rel=0.01)
    trainer.run(progress=False)
    evaluation = evaluated(trainer.folder, config)
    assert evaluation["guess_loss"] == pytest.approx(expected, rel=0.01)
    assert evaluation["layer_loss"][-1] + evaluation["layer_loss_margin"][-1] < 0.69
    assert "not better than a guess among 2" in evaluation["verdict"]


@pytest.mark.parametrize(("reference", "used"), [(0.9, 0.9), (5.0, math.log(2))])
def test_a_row_of_the_paper_keeps_its_own_reference(tmp_path: Path, reference: float, used: float) -> None:
    config = settings_for(write_table(tmp_path / "reviews.tsv"))
    config.use_preset("paper-text-ut")
    config.constraints.reference = reference
    trainer = new_trainer(RunFolder.create(tmp_path / "run", config), config)
    assert trainer.constraints.options.reference == pytest.approx(used)
    effect = "but the paper's: layer 1 may raise the loss" if used == reference else "which is used instead"
    assert f"note: --reference {reference:g} is above the loss of a guess, 0.6931, {effect}" in trainer.notes()


def test_runs_on_the_same_data_share_the_token_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those of another vocabulary, or of another length."""
    made: list[int] = []
    original = text.encoded_texts
    monkeypatch.setattr(text, "encoded_texts", lambda part, *rest: made.append(len(part)) or original(part, *rest))
    config = settings_for(write_table(tmp_path / "reviews.tsv"))
    data = text.load(config)
    first, second = (text.build(config, data, torch.device("cpu")) for _ in range(2))
    assert first.train is second.train
    assert len(made) == 3
    fewer = data._replace(train=data.train.subset(range(4)))
    other = text.build(config, fewer, torch.device("cpu"))
    assert len(made) == 6
    assert [row.tolist() for row in other.validation.rows] != [row.tolist() for row in first.validation.rows]
    text.build(settings_for(tmp_path / "reviews.tsv", max_tokens=3), data, torch.device("cpu"))
    assert len(made) == 9


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, encoder: Path) -> None:
    """With dropout, whose generator is part of the state."""
    config = settings_for(write_table(tmp_path / "reviews.tsv"), model=str(encoder))
    whole, run = trained(config, tmp_path / "whole"), RunFolder.create(tmp_path / "parts", config)
    with signal_after(signal.SIGTERM, 6), pytest.raises(Interrupted):
        train(run, config, progress=False)
    torch.manual_seed(99)  # a new process draws anew
    train(run, config, resume=True, progress=False)
    assert_same_runs(run, whole)


def test_a_step_is_that_of_the_lagrangian_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise, losses by depth, weights and update of one step, without the trainer's own pieces."""
    table = write_table(tmp_path / "reviews.tsv")
    config = settings_for(table, warmup_epochs=0, schedule="constant", batch=4, accumulate=2)
    trainer = new_trainer(RunFolder.create(tmp_path / "run", config), config)
    trainer.constraints.multipliers.copy_(torch.tensor([0.0, 0.5, 2.0]))
    model = trainer.model
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    loss = torch.zeros(())
    for micro_batch in trainer._micro_batches():
        inputs, labels, _ = trainer.workload.batch(micro_batch, torch.device("cpu"))
        with perturbed(model, gamma=0.3, seed=0, padding_id=0, std=model.embedding.weight.std(correction=0)) as noise:
            noise.next_sample = micro_batch[0][1]
            logits = model.depth_logits(inputs[0], lengths=inputs[1].sum(-1))
        depths = [torch.nn.functional.cross_entropy(depth, labels, reduction="sum") / 8 for depth in logits]
        bound = (1 - config.constraints.margin) * 0.9
        loss = loss + depths[2] + 0.5 * depths[1] + 2.0 * (depths[2] - bound * depths[1].detach())
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    monkeypatch.setattr(optimizer, "LARGEST_GRADIENT_NORM", float("inf"))
    trainer._train_step()
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        expected = torch.zeros_like(parameter) if gradient is None else gradient
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert any(not torch.equal(weights[name], value) for name, value in model.state_dict().items())


def logits_of(model: Any, folder: Path, texts: list[str]) -> torch.Tensor:
    """Return the logits of texts by transformers alone, with the tokenizer in `folder`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model(**tokenizer(texts, padding=True, truncation=True, max_length=12, return_tensors="pt")).logits


def test_an_encoder_is_fine_tuned_and_comes_back(tmp_path: Path, encoder: Path) -> None:
    config = settings_for(write_table(tmp_path / "reviews.tsv", 120), model=str(encoder), steps=60, gamma=0.0)
    run = trained(config, tmp_path / "run")
    evaluation = evaluated(run, config)
    assert evaluation["layers"] == 2
    assert evaluation["layer_loss"][-1] < 0.3
    assert evaluation["accuracy"][0] > 0.9
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(run.model)
    assert loaded.config.id2label == {0: "neg", 1: "pos"}
    assert "keys_to_ignore_at_inference" not in read_json(run.model / "config.json")
    # The accuracy is that of the saved model, used as anybody would use it.
    test = load_data(config).test
    right = (logits_of(loaded, run.model, test.texts).argmax(-1) == torch.tensor(test.labels)).double().mean().item()
    assert right == pytest.approx(evaluation["accuracy"][0])


LIMITS = [
    ("Longformer", {"attention_window": 8, "max_position_embeddings": 64}, {}, "limited: inner_pooling must be 'own'"),
    ("Bert", {}, {}, r"limited: cannot read rows of up to 33 tokens.* fewer positions, give a smaller --max-tokens"),
    ("Roberta", {"pad_token_id": 1}, {}, r"cannot read rows of up to 33 tokens.* \(InputError: .*out of range in self"),
    ("Bert", {"vocab_size": 9}, {}, r"ids up to \d+ .*its 9 word embeddings are not .* its tokenizer, another folder"),
    ("Bert", {"type_vocab_size": 1}, {"second_column": "second"}, r"limited: cannot read rows of .* another folder"),
]


@pytest.mark.parametrize(("kind", "changes", "options", "message"), LIMITS)
def test_the_limits_of_an_encoder_are_told_before_training(
    tmp_path: Path, encoder: Path, kind: str, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    sizes = {**ENCODER, "vocab_size": len((encoder / "vocab.txt").read_text().split())}
    config = getattr(transformers, f"{kind}Config")(**{"pad_token_id": 0, **sizes, **changes})
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path / "limited")
    transformers.BertTokenizerFast(str(encoder / "vocab.txt")).save_pretrained(tmp_path / "limited")
    table = write_table(tmp_path / "data" / "train.tsv")
    if options:  # a column of that name, of texts of one word
        table.write_text("".join(f"{line}\tsecond\n" for line in table.read_text().splitlines()))
    else:  # a text of 31 words, and it is a test text
        (tmp_path / "data" / "test.tsv").write_text("text\tlabel\n" + "film " * 31 + "\tpos\n")
    settings = settings_for(tmp_path / "data", model=str(tmp_path / "limited"), max_tokens=60, **options)
    with pytest.raises(InputError, match=message):
        new_trainer(RunFolder(tmp_path / "run"), settings)
    short = settings_for(tmp_path / "data", model=str(encoder), max_tokens=22, **options)
    assert new_trainer(RunFolder(tmp_path / "run"), short).workload.steps


def test_a_decoder_finds_the_end_of_a_text_whose_padding_it_has_no_embedding_of(tmp_path: Path, encoder: Path) -> None:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24, "eos_token_id": 3, "bos_token_id": None}
    words = (encoder / "vocab.txt").read_text().split()
    folder = tmp_path / "decoder"
    transformers.GPT2Model(transformers.GPT2Config(vocab_size=len(words), **sizes)).save_pretrained(folder)
    tokenizer = transformers.BertTokenizerFast(str(encoder / "vocab.txt"), pad_token="<new>", eos_token="[SEP]")
    tokenizer.save_pretrained(folder)
    config = settings_for(write_table(tmp_path / "reviews.tsv"), model=str(folder), steps=1)
    workload: Any = new_trainer(RunFolder(tmp_path / "run"), config).workload
    network = workload.network
    rows = network.tokenizer(["a film", "the plot was dull and a film was it"])["input_ids"]
    assert network.tokenizer.pad_token_id == len(words)
    rows = [torch.stack([torch.tensor(row), torch.ones(len(row), dtype=torch.int64)]) for row in rows]
    samples = EncodedSamples(rows, list(torch.tensor([0, 1]).unbind()), [])
    inputs = [samples.batch(chosen, network.padding_id, torch.device("cpu"))[0] for chosen in ([0], [0, 1])]
    alone, together = (network.depth_logits(part)[-1][0] for part in inputs)
    torch.testing.assert_close(alone, together)


@pytest.mark.parametrize(("kind", "used"), [("Llama", 0), ("Roberta", 1)])
def test_padding_is_the_tokenizer_s_but_where_positions_are_counted_from_it(
    tmp_path: Path, encoder: Path, kind: str, used: int
) -> None:
    sizes = {**ENCODER, "vocab_size": len((encoder / "vocab.txt").read_text().split())}
    config = getattr(transformers, f"{kind}Config")(pad_token_id=1, **sizes)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path / "model")
    transformers.BertTokenizerFast(str(encoder / "vocab.txt")).save_pretrained(tmp_path / "model")
    table = write_table(tmp_path / "reviews.tsv")
    settings = settings_for(table, model=str(tmp_path / "model"), steps=1, gamma=0.0, inner_pooling="own")
    run = trained(settings, tmp_path / "run")
    assert read_json(run.model / "config.json")["pad_token_id"] == used
    accuracy = evaluated(run, settings)["accuracy"]
    write_json(run.model / "config.json", {**read_json(run.model / "config.json"), "pad_token_id": 1})
    assert evaluated(run, settings)["accuracy"] == accuracy  # of a run that was saved with another
    if kind == "Llama":
        test, model = load_data(settings).test, transformers.AutoModelForSequenceClassification
        model = model.from_pretrained(run.model, pad_token_id=0).eval()
        every = [logits_of(model, run.model, [text]) for text in test.texts]
        right = (torch.cat(every).argmax(-1) == torch.tensor(test.labels)).double().mean().item()
        assert accuracy[0] == pytest.approx(right)


@pytest.mark.parametrize(("least", "told"), [(1, False), (3, True)])
def test_words_that_are_unknown_are_told(tmp_path: Path, least: int, told: bool) -> None:
    source = tmp_path / "texts.tsv"
    rows = [
        f"word{n} {order}\t{label}"
        for n in range(40)
        for label, order in enumerate((f"thing{n} film", f"film thing{n}"))
    ]
    source.write_text("text\tlabel\n" + "\n".join(rows))
    notes = new_trainer(RunFolder(tmp_path / "run"), settings_for(source, least_count=least)).notes()
    assert ("67% of the words of the validation and test texts are unknown" in notes[0]) == told


def test_words_and_embeddings_are_taken_from_a_pretrained_model(tmp_path: Path, encoder: Path) -> None:
    table = write_table(tmp_path / "reviews.tsv")
    config = settings_for(table, embedding=str(encoder), width=12, steps=4, lr=0.0)
    run = trained(config, tmp_path / "run")
    table_of_encoder = load_file(encoder / "model.safetensors")["embeddings.word_embeddings.weight"]
    assert torch.equal(load_file(run.model / "model.safetensors")["embedding.weight"], table_of_encoder)
    assert evaluated(run, config)["parameters"] > table_of_encoder.numel()


def test_the_classes_of_a_checkpoint_keep_their_order(tmp_path: Path, encoder: Path) -> None:
    made = tmp_path / "classifier"
    names = {0: "POS", 1: "NEG"}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=2, id2label=names)
    model.save_pretrained(made)
    transformers.AutoTokenizer.from_pretrained(encoder).save_pretrained(made)
    # More of one class than of the other: an untrained head that always gives one answer tells the orders apart.
    table = write_table(tmp_path / "reviews.tsv", 120)
    lines = table.read_text().splitlines()
    table.write_text("\n".join(line for n, line in enumerate(lines) if n % 4 != 2) + "\n")
    config = settings_for(table, model=str(made), steps=1, lr=0.0, gamma=0.0)
    run = trained(config, tmp_path / "run")
    evaluation = evaluated(run, config)
    assert evaluation["classes"] == ["POS", "NEG"]
    test = load_data(config).test
    logits = logits_of(model.eval(), made, test.texts)
    targets = torch.tensor([{"pos": 0, "neg": 1}[test.names[label]] for label in test.labels])
    right = (logits.argmax(-1) == targets).double().mean().item()
    assert right != 0.5
    assert evaluation["accuracy"][0] == pytest.approx(right)
    loss = torch.nn.functional.cross_entropy(logits, targets).item()
    assert evaluation["layer_loss"][-1] == pytest.approx(loss, rel=1e-5)


def test_texts_that_changed_are_not_those_of_a_run(tmp_path: Path) -> None:
    table = write_table(tmp_path / "reviews.tsv")
    config = settings_for(table, steps=4)
    run = trained(config, tmp_path / "run")
    write_table(table, seed=1)
    with pytest.raises(InputError, match="the texts are not those that"):
        train(run, config, resume=True, progress=False)
    with pytest.raises(InputError, match="the texts are not those that"):  # it was trained on some of them
        evaluated(run, config)


def without_a_weight(folder: Path, name: str) -> None:
    weights = load_file(folder / "model.safetensors")
    (key,) = [key for key in weights if key.endswith(name)]
    del weights[key]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_weights_that_are_missing_never_become_random_numbers(tmp_path: Path, encoder: Path) -> None:
    table = write_table(tmp_path / "reviews.tsv")
    config = settings_for(table, model=str(encoder), steps=2, gamma=0.0)
    run = trained(config, tmp_path / "run")
    without_a_weight(run.model, "layer.1.output.dense.weight")
    with pytest.raises(InputError, match=r"lacks 1 weights of a BertForSequence.*layer\.1\.output\.dense"):
        evaluated(run, config)
    damaged = shutil.copytree(encoder, tmp_path / "encoder")
    without_a_weight(damaged, "layer.0.attention.self.query.weight")
    for name in ("model", "embedding"):
        with pytest.raises(InputError, match=r"lacks 1 weights"):
            trained(settings_for(table, steps=2, **{name: str(damaged)}), tmp_path / name)
