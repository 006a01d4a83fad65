"""Perturbed word embeddings: `e + γ std(e) ε`, words left out, or words in each other's places (docs/maths.md §8)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.checks import check_choice, check_integer, check_non_negative, check_number
from cdt_fast.errors import InputError
from cdt_fast.training.counter_based_rng import DISTRIBUTIONS, hashed, unit_interval, unit_noise

TOKEN_KINDS = ("drop", "swap")


@dataclass
class Perturbation:
    """What `perturbed` does to the word embeddings of the texts that pass.

    Texts are numbered as they pass, and the draw for a text is a function of the seed, its number, the token's place
    in the text and the component. So it is the same however texts are put into batches and padded, on whatever device,
    and at every γ.

    Attributes:
        kind, seed, rate, padding_id: as in `perturbed`.
        gamma: γ, its least and its greatest value; between them it is drawn for each text.
        special_ids: the ids that "drop" and "swap" never touch, that of padding too.
        std: the standard deviation of the embeddings, a tensor `[]`; None for "drop" and "swap".
        samples: the numbers of the texts that pass next, int64 `[texts]`; None: they are counted.
        next_sample: the number of the next text; set it to draw again, or to go on where a training stopped.
    """

    kind: str
    gamma: tuple[float, float]
    seed: int
    rate: float
    special_ids: Tensor
    padding_id: int | None
    std: Any
    samples: Tensor | None
    next_sample: int = 0

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
        self.next_sample += count
        return torch.arange(self.next_sample - count, self.next_sample, device=device)

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
    samples: Tensor | None = None,
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
            it where the table is sharded, and where the model scales its embeddings.
        rate: "drop" and "swap" choose each word with probability `min(1, rate · γ)`.
        special_ids: ids that "drop" and "swap" never touch: `tokenizer.all_special_ids`. `padding_id` is one by itself.
        padding_id: the id of padding; None: the model's, if its config or embeddings have one.
        samples: as in `Perturbation`.

    Yields:
        The `Perturbation`.

    Raises:
        InputError: an argument out of its range, a model without word embeddings, or "drop" or "swap" without ids to
            be left alone.
    """
    embedding = word_embeddings(model)
    check_choice("kind", kind, (*DISTRIBUTIONS, *TOKEN_KINDS))
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
    if kind in TOKEN_KINDS:
        std = None
    elif std is None:
        std = embedding_std(embedding.weight)
    elif isinstance(std, Tensor):
        std = std.detach()
    else:
        std = torch.tensor(check_non_negative("std", std), dtype=torch.float64)
    ids = torch.tensor(special, dtype=torch.int64)
    perturbation = Perturbation(kind, (least, greatest), seed % 2**62, rate, ids, padding_id, std, samples)

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


def embedding_std(table: Any) -> Tensor:
    """The standard deviation over all entries of word embeddings `[vocabulary, width]`, `[]` in at least float32."""
    return table.detach().to(torch.promote_types(table.dtype, torch.float32)).std(correction=0)


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
