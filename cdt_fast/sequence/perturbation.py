"""Perturbed word embeddings, and what a classifier makes of them (docs/maths.md §8).

`e + γ std(e) ε`, words left out, or words in each other's places; accuracy and losses by depth over γ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.checks import check_choice, check_integer, check_non_negative, check_number
from cdt_fast.errors import InputError
from cdt_fast.models.early_exit import wilson_interval
from cdt_fast.ops.shared.checks import describe
from cdt_fast.sequence.counter_based_rng import hashed, unit_interval, unit_noise
from cdt_fast.sequence.kinds import DISTRIBUTIONS, GAMMAS, KINDS, TOKEN_KINDS
from cdt_fast.training.per_sample import per_sample_statistics

_IGNORED = -100  # the label of what does not count


class Perturbation:
    """What `perturbed` does to the word embeddings of the texts that pass.

    Texts are numbered as they pass, and the draw for a text is a function of the seed, its number, the token's place
    in the text and the component. So it is the same however texts are put into batches and padded, on whatever device,
    and at every γ.

    Attributes:
        gamma: γ, its least and its greatest value; between them it is drawn for each text.
        next_sample: the number of the next text; set it to draw again, or to go on where a training stopped.
        stride: by how much the number rises from one text to the next. Where R ranks take every R-th text of a batch,
            rank r starts at r and has a stride of R: all of them draw what one process would.
        samples: the numbers of the texts that pass next, int64 `[texts]`, in place of both; None: they are counted.
        std: the standard deviation of the embeddings, a tensor `[]`; None for "drop" and "swap".
    """

    def __init__(
        self,
        kind: str,
        gamma: tuple[float, float],
        seed: int,
        rate: float,
        special_ids: Tensor,
        padding_id: int | None,
        std: Any,
    ) -> None:
        self.kind, self.gamma, self.seed, self.rate = kind, gamma, seed, rate
        self.special_ids, self.padding_id, self.std = special_ids, padding_id, std
        self.next_sample, self.stride = 0, 1
        self.samples: Tensor | None = None

    def __call__(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """The perturbed word embeddings `[..., T, width]` of the texts `ids` `[..., T]`; the numbering goes on."""
        tokens = ids.reshape(-1, ids.shape[-1])
        samples = self._numbers(len(tokens), ids.device).unsqueeze(-1)
        least, greatest = self.gamma
        if greatest == 0.0:
            return embedded
        start = torch.full_like(samples, self.seed)
        # `seed` is below 2⁶²: what is drawn for a whole text is a stream of its own.
        gamma = least + (greatest - least) * unit_interval(hashed(start + 2**62, samples))  # `[texts, 1]`
        keys = hashed(hashed(start, samples), self._places(tokens))  # a stream a token
        if self.kind in DISTRIBUTIONS:
            components = torch.arange(embedded.shape[-1], device=ids.device)
            noise = unit_noise(hashed(keys.unsqueeze(-1), components), self.kind).view(embedded.shape)
            std = self.std.to(embedded.device, torch.promote_types(embedded.dtype, torch.float32))
            amount = (gamma.to(std.dtype) * std).view(*ids.shape[:-1], 1, 1)
            return embedded + (amount * noise).to(embedded.dtype)
        chosen = unit_interval(hashed(keys, torch.zeros_like(keys))) < self.rate * gamma
        chosen &= ~torch.isin(tokens, self.special_ids.to(ids.device))
        if self.kind == "drop":
            return embedded.masked_fill(chosen.view(ids.shape).unsqueeze(-1), 0.0)
        source = _exchanged(chosen, unit_interval(hashed(keys, torch.ones_like(keys))))
        return embedded.gather(-2, source.view(ids.shape).unsqueeze(-1).expand(embedded.shape))

    def _numbers(self, count: int, device: torch.device) -> Tensor:
        if self.samples is not None:
            return self.samples
        first = self.next_sample
        self.next_sample = first + self.stride * count
        return first + self.stride * torch.arange(count, device=device)

    def _places(self, tokens: Tensor) -> Tensor:
        """The place of each token in its text, `[texts, T]`, so that padding on the left moves nothing."""
        places = torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens)
        if self.padding_id is None:
            return places
        leading = ((tokens != self.padding_id).cumsum(-1) == 0).sum(-1, keepdim=True)
        return (places - leading).clamp(min=0)


@contextmanager
def perturbed(
    model: nn.Module,
    kind: str = "gaussian",
    gamma: float | tuple[float, float] = 1.0,
    *,
    seed: int = 0,
    std: float | Tensor | None = None,
    rate: float = 0.15,
    special_ids: Sequence[int] = (),
    padding_id: int | None = None,
) -> Iterator[Perturbation]:
    """Perturb what comes out of a model's word embeddings, in training and in evaluation, while the block lasts.

        with perturbed(model, gamma=0.5, padding_id=tokenizer.pad_token_id):
            trainer.train()

    Only texts given as ids are perturbed: embeddings that are handed to the model directly do not pass here.

    Args:
        model: a transformers model, a `TextUT`, or an `nn.Embedding`.
        kind: "gaussian", "laplace" or "uniform": `e + γ std(e) ε` with ε of mean 0 and variance 1, on all tokens.
            "drop": the vector of a chosen word becomes zero. "swap": the chosen words of a text take each other's
            places, in a cycle drawn at random (which a model without positions does not notice).
        gamma: γ ≥ 0; 0 changes nothing. Two numbers: the range that it is drawn from, evenly, for each text.
        seed: of the draws.
        std: std(e), one number; None: that of the whole embedding table, taken once, at the start of the block. Give
            it where that is not the table's that trains (`embedding_std` has that of the words in use), where the
            table is sharded, and where the model scales its embeddings.
        rate: "drop" and "swap" choose each word with probability `min(1, rate · γ)`.
        special_ids: ids that "drop" and "swap" never touch: `tokenizer.all_special_ids`. `padding_id` is one by itself.
        padding_id: the id of padding; None: the model's, if its config or embeddings have one.

    Yields:
        The `Perturbation`.

    Raises:
        InputError: an argument out of its range, a model without word embeddings, or "drop" or "swap" without ids to
            be left alone.
    """
    embedding = word_embeddings(model)
    check_choice("kind", kind, KINDS)
    levels = gamma if isinstance(gamma, tuple) and len(gamma) == 2 else (gamma, gamma)
    least, greatest = (check_non_negative("gamma", level) for level in levels)
    if least > greatest:
        raise InputError(f"gamma must be one level, or the least and the greatest of a range, got {gamma}")
    check_integer("seed", seed, 0)
    check_number("rate", rate, "a number in (0, 1]", lambda number: 0 < number <= 1)
    if padding_id is None:
        padding_id = _padding_of(model, embedding)
    special = sorted({check_integer("special_ids", index, 0) for index in special_ids})
    if kind in TOKEN_KINDS and not special:
        raise InputError(f"special_ids must hold the ids that {kind!r} leaves alone, for example all_special_ids")
    if padding_id is not None:
        special.append(check_integer("padding_id", padding_id, 0))
    scale = None
    if kind in DISTRIBUTIONS:
        table = embedding.weight
        assert isinstance(table, Tensor)  # or `word_embeddings` would have refused it
        scale = embedding_std(table) if std is None else _check_std(std)
    perturbation = Perturbation(
        kind, (least, greatest), seed % 2**62, rate, torch.tensor(special, dtype=torch.int64), padding_id, scale
    )

    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Tensor) -> Tensor:
        return perturbation(arguments[0] if arguments else keywords["input"], output)

    handle = embedding.register_forward_hook(hook, with_kwargs=True)
    try:
        yield perturbation
    finally:
        handle.remove()


def word_embeddings(model: nn.Module) -> nn.Module:
    """The module that turns ids into word embeddings.

    Raises:
        InputError: `model` has none.
    """
    if isinstance(model, nn.Embedding):
        return model
    find = getattr(model, "get_input_embeddings", None)
    found = find() if callable(find) else None
    if not isinstance(found, nn.Module) or not isinstance(getattr(found, "weight", None), Tensor):
        raise InputError(f"model must have word embeddings (get_input_embeddings()), got a {type(model).__name__}")
    return found


@torch.no_grad()
def embedding_std(table: Tensor, ids: Tensor | None = None) -> Tensor:
    """The standard deviation over all entries of word embeddings, a tensor `[]` in at least float32.

    Args:
        table: `[vocabulary, width]`.
        ids: only the rows that occur in these, once each; None: all rows.

    Raises:
        InputError: `table` is no such tensor, or `ids` are no integers or none at all.
    """
    if not isinstance(table, Tensor) or table.dim() != 2 or not table.is_floating_point():
        raise InputError(f"table must be floating point [vocabulary, width], got {describe(table)}")
    if ids is not None:
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or not ids.numel():
            raise InputError(f"ids must hold token ids (int32 or int64), got {describe(ids)}")
        table = table[ids.unique()]
    return table.detach().to(torch.promote_types(table.dtype, torch.float32)).std(correction=0)


def _check_std(std: Any) -> Tensor:
    if isinstance(std, Tensor):
        if std.numel() != 1 or not std.is_floating_point():
            raise InputError(f"std must be one number, got {describe(std)}")
        return std.detach().reshape(())
    return torch.tensor(check_non_negative("std", std), dtype=torch.float64)


def _padding_of(model: nn.Module, embedding: nn.Module) -> int | None:
    configured = getattr(getattr(model, "config", None), "pad_token_id", None)
    found = getattr(embedding, "padding_idx", None) if configured is None else configured
    return found if isinstance(found, int) and found >= 0 else None


def _exchanged(chosen: Tensor, order: Tensor) -> Tensor:
    """`[texts, T]`: from where each place takes its token; the chosen ones go round in the order of `order`."""
    places = torch.arange(chosen.shape[-1], device=chosen.device).expand_as(chosen)
    ring = torch.argsort(torch.where(chosen, order, 2.0), dim=-1)  # the chosen places first
    count = chosen.sum(-1, keepdim=True)
    following = ring.gather(-1, torch.where(places + 1 < count, places + 1, 0))
    return places.scatter(-1, ring, torch.where(places < count, following, ring))


@torch.no_grad()
def evaluate_classifier(
    model: nn.Module,
    batches: Iterable[tuple[Any, Tensor]],
    depth_logits: Callable[[Any], Iterable[Tensor]],
    *,
    gammas: Sequence[float] = GAMMAS,
    training_gamma: float = 0.0,
    kind: str = "gaussian",
    **perturbation: Any,
) -> dict[str, Any]:
    """Accuracy over γ, and the losses of every depth, of a model whose word embeddings are perturbed.

        evaluate_classifier(model, batches, lambda batch: model.depth_logits(*batch))

    The draws are the same at every γ. The model is in evaluation mode meanwhile.

    Args:
        model: whose word embeddings are perturbed; see `perturbed`.
        batches: `(inputs, labels)` each, gone through once a γ: a list or a loader, no iterator. Labels are int64
            `[B]`, or `[B, T]` for an answer a token; those of −100 do not count.
        depth_logits: gives for `inputs` the logits of the depths 0..L, one after the other: `[B, classes]`, or
            `[B, T, classes]` where the label of a token is in its own place. On the device of the labels.
        gammas: ascending noise levels.
        training_gamma: the noise level of `layer_loss`, `layer_ratio` and `per_sample`.
        kind: as in `perturbed`.
        perturbation: further arguments of `perturbed`.

    Returns:
        The part of an `evaluation.json` that can be measured here: `layers`; `answers`, how many counted; `gamma`; for
        each γ the last depth's `accuracy`, its 95 % interval (Wilson) `accuracy_interval`, and of all depths
        `depth_accuracy` and `depth_loss` (nats); `auc`, the trapezoid of accuracy over γ (None for a single γ); at the
        training γ `layer_loss`, `layer_ratio` (None where a loss before is zero), `depth_agreement`, the share of the
        answers that a depth gives as the last one does, and `per_sample`, see `per_sample_statistics`. The interval
        takes answers for independent: of tokens it is too narrow.

    Raises:
        InputError: an argument out of its range, nothing that counts, or logits that do not fit the labels.
    """
    levels = [check_non_negative("gammas", gamma) for gamma in gammas]
    if not levels or any(first >= second for first, second in pairwise(levels)):
        raise InputError(f"gammas must be ascending noise levels, got {list(gammas)}")
    trained = check_non_negative("training_gamma", training_gamma)
    if isinstance(batches, Iterator):
        raise InputError("batches must be a list or a loader that can be gone through once a noise level")
    was_training = model.training
    model.eval()
    try:
        measured = {}
        for gamma in dict.fromkeys((*levels, trained)):
            with perturbed(model, kind, gamma, **perturbation):
                measured[gamma] = _measure(batches, depth_logits)
    finally:
        model.train(was_training)
    answers = int(measured[trained].counts.sum())
    correct = [measured[gamma].correct.tolist() for gamma in levels]
    accuracy = [row[-1] / answers for row in correct]
    losses = measured[trained].mean_losses()
    return {
        "layers": len(losses) - 1,
        "answers": answers,
        "gamma": levels,
        "accuracy": accuracy,
        "accuracy_interval": [list(wilson_interval(row[-1], answers)) for row in correct],
        "auc": area_under_curve(levels, accuracy) if len(levels) > 1 else None,
        "depth_accuracy": [[right / answers for right in row] for row in correct],
        "depth_loss": [measured[gamma].mean_losses() for gamma in levels],
        "training_gamma": trained,
        "layer_loss": losses,
        "depth_agreement": (measured[trained].agreed / answers).tolist(),
        "layer_ratio": [after / before if before else None for before, after in pairwise(losses)],
        "per_sample": per_sample_statistics(measured[trained].sums / measured[trained].counts),
    }


def area_under_curve(x: Sequence[float], y: Sequence[float]) -> float:
    """The trapezoid of `y` over `x`, in units of x times y: an accuracy of one over γ from 0 to 2 has an area of 2."""
    return sum((x[index] - x[index - 1]) * (y[index] + y[index - 1]) / 2 for index in range(1, min(len(x), len(y))))


class _Measured:
    """Of one γ: `sums` `[L+1, samples]` of the losses, `counts` `[samples]` of the answers, `correct` and `agreed`,
    those answered as by the last depth, `[L+1]`."""

    def __init__(self, sums: Tensor, counts: Tensor, correct: Tensor, agreed: Tensor) -> None:
        self.sums, self.counts, self.correct, self.agreed = sums, counts, correct, agreed

    def mean_losses(self) -> list[float]:
        return (self.sums.sum(1) / self.counts.sum()).tolist()


def _measure(batches: Iterable[tuple[Any, Tensor]], depth_logits: Callable[[Any], Iterable[Tensor]]) -> _Measured:
    sums, counts, correct, agreed = [], [], [], []
    for inputs, labels in batches:
        if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or not labels.dim():
            raise InputError(f"labels must be an int64 tensor [B] or [B, T], got {describe(labels)}")
        counted = labels != _IGNORED
        # Depth by depth: the logits of a language model are too large to be held for all depths at once.
        depths = [_read(logits, labels) for logits in depth_logits(inputs)]
        sums.append(torch.stack([loss for loss, _ in depths]))
        answers = torch.stack([answer for _, answer in depths])
        correct.append(((answers == labels) & counted).flatten(1).sum(1))
        agreed.append(((answers == answers[-1]) & counted).flatten(1).sum(1))
        counts.append(counted.flatten(1).sum(1) if labels.dim() > 1 else counted.long())
    total = sum(int(count.sum()) for count in counts)
    if not total:
        raise InputError("batches must hold at least one label that counts")
    shares = (torch.stack(numbers).sum(0).cpu() for numbers in (correct, agreed))
    return _Measured(torch.cat(sums, 1).cpu(), torch.cat(counts).cpu(), *shares)


def _read(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Of one depth: the samples' loss sums `[B]` in float64, and the answers, of the shape of the labels."""
    if logits.shape[:-1] != labels.shape:
        raise InputError(f"depth_logits gave logits {tuple(logits.shape)} for labels {tuple(labels.shape)}")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = nn.functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=_IGNORED
    )
    losses = losses.view(len(labels), -1).sum(1, dtype=torch.float64)
    return losses, logits.argmax(-1)
