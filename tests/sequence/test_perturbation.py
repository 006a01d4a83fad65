"""Perturbed word embeddings and their evaluation, against loops in plain Python and closed forms."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Sequence
from statistics import stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cdt_fast import models
from cdt_fast.checks import InputError
from cdt_fast.sequence import evaluation
from cdt_fast.sequence.networks import EVALUATION_SEED, UnrolledNetwork
from cdt_fast.sequence.perturbation import hashed, perturbed, unit_gaussian
from cdt_fast.sequence.settings import TextSettings
from cdt_fast.sequence.tokenizers import EncodedSamples
from cdt_fast.training.results import mean_margin, per_sample_statistics

PAD = 0


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def words(width: int = 5, vocabulary: int = 40) -> nn.Embedding:
    table = 0.3 + 2.0 * torch.randn(vocabulary, width, generator=generator(2), dtype=torch.float64)
    return nn.Embedding.from_pretrained(table, freeze=False)


def batch(texts: int = 6, tokens: int = 12) -> tuple[Tensor, list[int]]:
    """Return texts of several lengths, padded on the right."""
    ids = torch.full((texts, tokens), PAD)
    lengths = [tokens - text % 6 for text in range(texts)]
    for text, length in enumerate(lengths):
        ids[text, :length] = torch.randint(3, 40, (length,), generator=generator(text))
    return ids, lengths


# The hash, in Python's integers


def written_hash(key: int, index: int) -> int:
    mask = 2**64 - 1
    bits = (key + (index + 1) * 0x9E3779B97F4A7C15) & mask
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
    return bits ^ (bits >> 31)


def written_noise(seed: int, text: int, token: int, component: int) -> float:
    bits = written_hash(written_hash(written_hash(seed, text), token), component)
    centered = 2 * ((bits >> 40) + 0.5) / 2**24 - 1
    return math.sqrt(2) * torch.erfinv(torch.tensor(centered, dtype=torch.float64)).item()


def test_the_hash_is_splitmix64() -> None:
    # The first outputs of the published generator from the seed 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [bits % 2**64 for bits in hashed(torch.tensor(1234567), torch.arange(3)).tolist()] == published
    keys, indices = [0, 5, -3, 2**63 - 1, -(2**63)], [0, 1, 2**40]
    found = hashed(torch.tensor(keys).unsqueeze(1), torch.tensor(indices)).tolist()
    expected = [[written_hash(key % 2**64, index) for index in indices] for key in keys]
    assert [[bits % 2**64 for bits in row] for row in found] == expected


def test_noise_is_gaussian_with_finite_ends_and_that_of_neighbors_is_independent() -> None:
    bits = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    ends = unit_gaussian(bits)
    assert ends.isfinite().all()
    assert (ends[0], ends[2]) == (-ends[1], -ends[3])
    assert ends[0] < ends[2] < ends[3] < ends[1]
    noise = unit_gaussian(hashed(hashed(torch.tensor(7), torch.arange(1000)).unsqueeze(1), torch.arange(200))).double()
    count = noise.numel()
    assert abs(noise.mean()) < 5 / math.sqrt(count)
    assert noise.square().mean().item() == pytest.approx(1, abs=5 * math.sqrt(2 / count))
    assert (noise**4).mean().item() == pytest.approx(3, rel=0.07)
    assert noise.abs().median().item() == pytest.approx(0.6745, rel=0.01)
    for shift in (1, 200):  # neighbors in a token, and the same component of neighboring tokens
        flat = noise.flatten()
        assert abs((flat[shift:] * flat[:-shift]).mean()) < 5 / math.sqrt(count)


# What the hook does to embeddings


def test_the_noise_is_gamma_times_the_table_s_deviation() -> None:
    embedding, (ids, _) = words(64), batch(50)
    clean, table = embedding(ids), embedding.weight.detach()
    std = math.sqrt(((table - table.mean()) ** 2).mean())
    with perturbed(embedding, 0.5, padding_id=PAD) as perturbation:
        noise = embedding(ids) - clean
    assert perturbation.std.item() == pytest.approx(std, rel=1e-12)
    assert noise.std().item() == pytest.approx(0.5 * std, rel=0.02)
    with perturbed(embedding, 1.5, std=3.0):
        other = embedding(ids) - clean
    torch.testing.assert_close(other / (1.5 * 3.0), noise / (0.5 * std), rtol=1e-6, atol=1e-7)
    assert torch.equal(embedding(ids), clean)  # the hook is gone
    narrow = words().to(torch.bfloat16)
    with perturbed(narrow, std=torch.tensor(0.5)):
        assert narrow(ids).dtype == torch.bfloat16


def draws(batches: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """Return what the embeddings become, text by text, without what stands at padding."""
    embedding, found = words(4), []
    with perturbed(embedding, 1.0, padding_id=PAD, **options):
        for ids in batches:
            found += [row[text != PAD] for row, text in zip(embedding(ids), ids, strict=True)]
    return found


def test_a_draw_does_not_depend_on_how_texts_are_put_into_batches_or_padded() -> None:
    ids, lengths = batch()
    expected = draws([ids])
    cuts = {
        "one by one": [ids[i : i + 1, :length] for i, length in enumerate(lengths)],
        "uneven": [ids[:1], ids[1:5], ids[5:]],
        "longer": [nn.functional.pad(ids, (0, 9))],
        "left": [torch.stack([row.roll(12 - length) for row, length in zip(ids, lengths, strict=True)])],
    }
    for name, cut in cuts.items():
        assert all(map(torch.equal, draws(cut), expected)), name
    for other in (draws([ids], seed=1), draws([ids.flip(0)])[::-1]):
        assert not all(map(torch.equal, other, expected))


def test_texts_are_numbered_on_and_can_be_drawn_again() -> None:
    embedding, (ids, _) = words(), batch()
    with perturbed(embedding, seed=3) as perturbation:
        first, second = embedding(ids), embedding(ids)
        assert perturbation.next_sample == 12
        perturbation.next_sample = 6
        assert torch.equal(embedding(ids), second)
    assert not torch.equal(first, second)
    with perturbed(embedding, 0.0) as perturbation:
        assert torch.equal(embedding(ids), embedding.weight[ids])
    assert perturbation.next_sample == 6


def test_the_gradient_passes_to_the_words_and_the_hook_goes_also_after_an_error() -> None:
    embedding, ids = words(3), torch.tensor([[4, 5, 4]])
    with perturbed(embedding, 1.0):
        (gradient,) = torch.autograd.grad(embedding(ids).sum(), embedding.weight)
    assert [gradient[4].tolist(), gradient[5].tolist()] == [[2] * 3, [1] * 3]
    with pytest.raises(KeyError), perturbed(embedding):
        raise KeyError
    assert torch.equal(embedding(ids), embedding.weight[ids])


@pytest.mark.parametrize(
    ("arguments", "options", "word"),
    [
        ((nn.Linear(2, 2),), {}, "Linear"),
        *(((words(), gamma), {}, "gamma") for gamma in (-0.1, float("nan"))),
        *(((words(),), {name: -1}, name) for name in ("seed", "std", "padding_id")),
    ],
)
def test_a_bad_argument_is_named(arguments: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word), perturbed(*arguments, **options):
        pass


# Attached to models


class Refusing(nn.Module):
    """A model without a table of words, as transformers' Canine."""

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError


class Paired(nn.Embedding):
    """Embeddings with their scale, as those of I-BERT."""

    def forward(self, input: Tensor) -> Any:
        return super().forward(input), torch.ones(1)


def test_embeddings_of_another_kind_are_refused() -> None:
    with pytest.raises(InputError, match=r"must have word embeddings .*, got a Refusing"):
        perturbed(Refusing())
    with perturbed(embedding := Paired(40, 5)), pytest.raises(InputError, match="got the tuple of Paired"):
        embedding(batch()[0])


SCALED: list[tuple[str, dict[str, Any]]] = [  # a buffer, and a number; both 4 for a width of 16
    ("Gemma", {"num_key_value_heads": 1, "head_dim": 8}),
    ("XGLM", {"d_model": 16, "num_layers": 1, "attention_heads": 2, "ffn_dim": 8, "scale_embedding": True}),
]


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(("kind", "options"), SCALED)
def test_the_noise_of_scaled_embeddings_is_scaled(kind: str, options: dict[str, Any], adapted: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = getattr(transformers, f"{kind}Config")(vocab_size=40, pad_token_id=PAD, **sizes, **options)
    model, (ids, _) = getattr(transformers, f"{kind}ForCausalLM")(config), batch(50)
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["embed_tokens"]))
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        clean = embedding(ids)
        with perturbed(model, 0.5) as perturbation:
            noise = embedding(ids) - clean
    assert perturbation.padding_id == PAD
    assert noise.std().item() == pytest.approx(0.5 * 4 * embedding.weight.std().item(), rel=0.03)


# Evaluation


def test_the_evaluation_of_a_text_ut_is_that_of_a_loop_over_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_TEXTS_AT_ONCE", 1)  # so that there are five batches
    torch.manual_seed(4)
    model = models.TextUT((40, 6), 3, 2).double().train()
    lengths = torch.randint(2, 9, (30,), generator=generator(1))
    ids = torch.randint(3, 40, (30, 8), generator=generator(2))
    labels = torch.randint(0, 3, (30,), generator=generator(3))
    cut = [text[:length] for text, length in zip(ids, lengths, strict=True)]
    samples = EncodedSamples([torch.stack([text, torch.ones_like(text)]) for text in cut], list(labels), [1] * 30)
    measuring = {"evaluation": {"gammas": [0.0, 0.5, 2.0]}, "training": {"batch": 6, "device": "cpu"}}
    settings = TextSettings.chosen({"data": {"gamma": 0.75}, **measuring})
    network = UnrolledNetwork(model, SimpleNamespace(pad_token_id=PAD, eos_token_id=None))
    alive: list[int] = []

    def count(*_: Any) -> None:
        gc.collect()
        alive.append(sum(issubclass(type(found), Tensor) for found in gc.get_objects()))

    with model.embedding.register_forward_pre_hook(count):
        found = evaluation.measure(network, samples, settings, False)
    assert max(alive[-16:]) <= min(alive[-16:]) + 1, "no tensor of a batch stays until the next one, of another size"
    assert not model.training
    table = model.embedding.weight.detach()
    std, losses = math.sqrt(((table - table.mean()) ** 2).mean()), {}
    for gamma in (0.0, 0.5, 2.0, 0.75):
        rows, right = [], [0, 0, 0]
        for text, length in enumerate(lengths.tolist()):
            noise = [[written_noise(EVALUATION_SEED, text, token, c) for c in range(6)] for token in range(length)]
            vectors = table[ids[text, :length]] + gamma * std * torch.tensor(noise, dtype=torch.float64)
            given = {"embedding.weight": vectors}  # a word each
            words = torch.arange(length)
            logits = [torch.func.functional_call(model, given, (words, depth)).tolist() for depth in range(3)]
            rows.append([math.log(sum(map(math.exp, z))) - z[labels[text]] for z in logits])
            right = [count + (z.index(max(z)) == labels[text]) for count, z in zip(right, logits, strict=True)]
        losses[gamma] = rows
        mean = [sum(depth) / 30 for depth in zip(*rows, strict=True)]
        if gamma == 0.75:
            assert found["layer_loss"] == pytest.approx(mean, rel=1e-6)
            continue
        index = found["gamma"].index(gamma)
        assert found["depth_accuracy"][index] == [count / 30 for count in right]
        assert found["accuracy"][index] == right[-1] / 30
        assert found["depth_loss"][index] == pytest.approx(mean, rel=1e-6)
    ratios = sorted(row[depth + 1] / row[depth] for row in losses[0.75] for depth in range(2))
    assert found["per_sample"]["mean_ratio"] == pytest.approx(sum(ratios) / 60, rel=1e-6)
    assert found["per_sample"]["median_ratio"] == pytest.approx((ratios[29] + ratios[30]) / 2, rel=1e-6)
    assert found["per_sample"]["descending_fraction"] == sum(ratio < 1 for ratio in ratios) / 60
    accuracy = found["accuracy"]
    for fraction, margin in zip(accuracy, found["accuracy_margin"], strict=True):
        square = 1.959963984540054**2 / 30  # Wilson: the ends are fractions that are so many deviations away
        end = fraction + (margin if fraction < 0.5 else -margin)  # the farther one
        assert margin**2 == pytest.approx(square * end * (1 - end))
    assert found["auc"] == pytest.approx(0.25 * (accuracy[0] + accuracy[1]) + 0.75 * (accuracy[1] + accuracy[2]))
    assert (found["layers"], found["answers"], found["training_gamma"]) == (2, 30, 0.75)
    json.dumps(found, allow_nan=False)


def test_right_tokens_of_a_text_go_together() -> None:
    right, counts = torch.tensor([[10.0, 10.0, 0.0, 0.0]], dtype=torch.float64), torch.full((4,), 10)
    # Residuals of 5 tokens, t = 3.182 of three degrees: forty tokens by themselves would have .15.
    assert evaluation.accuracy_margin(right, counts) == pytest.approx(3.1824463 * math.sqrt(4 * 25 * 4 / 3) / 40)
    assert evaluation.accuracy_margin(right[:, :1], counts[:1]) == 1.0


def test_statistics_leave_out_the_ratio_to_a_loss_of_zero() -> None:
    found = per_sample_statistics(torch.tensor([[1.0, 0.0, 2.0], [0.5, 3.0, 9.0]]))
    assert (found["mean_ratio"], found["median_ratio"]) == pytest.approx((2.5, 2.5))
    assert found["descending_fraction"] == pytest.approx(1 / 3)  # to rise from zero is no descent
    assert found["quantiles"] == pytest.approx([0.5 + 4 * step / 20 for step in range(21)])  # of .5 and 4.5
    assert per_sample_statistics(torch.zeros(2, 3))["mean_ratio"] is None


def test_the_margin_of_a_mean_is_that_of_samples_and_not_of_their_tokens() -> None:
    losses, ones = torch.tensor([[1.0, 2.0, 6.0]], dtype=torch.float64), torch.ones(3, dtype=torch.int64)
    expected = 4.3026527 * stdev([1.0, 2.0, 6.0]) / math.sqrt(3)
    assert mean_margin(losses, ones) == pytest.approx([expected])
    assert mean_margin(losses * 50, ones * 50) == pytest.approx([expected])
    # All tokens are alike, so that no sample differs in their mean.
    assert mean_margin(losses, torch.tensor([1, 2, 6])) == pytest.approx([0.0])
    assert mean_margin(losses[:, :1], ones[:1]) is None
