"""Gaussian noise on word embeddings, `e + γ std(e) ε` (docs/ops.md §5), drawn by place.

Each number is a hash of (seed, text, token, component), by the output function of SplitMix64 (Steele, Lea, Flood 2014):
the same however a batch is cut, padded or sharded, and on every device, up to the rounding of `erfinv`.
"""

import contextlib
import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from cdt_fast.checks import InputError, check_integer, check_non_negative

# The constants of SplitMix64 as signed 64-bit integers, in which torch's products wrap around.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def hashed(key: Tensor, index: Tensor) -> Tensor:
    """Return 64 random bits for each `index` ≥ 0 of the stream `key`, both int64 and broadcast against each other."""
    bits = key + (index + 1) * _STEP
    # In place, which takes a CPU a fifth less time than fresh memory.
    bits = _shifted(bits, 30).bitwise_xor_(bits).mul_(_FIRST)
    bits = _shifted(bits, 27).bitwise_xor_(bits).mul_(_SECOND)
    return _shifted(bits, 31).bitwise_xor_(bits)


def unit_gaussian(bits: Tensor) -> Tensor:
    """Return float32 of mean 0 and variance 1, from 64 random bits each."""
    centered = _shifted(bits, 40).mul_(2).sub_(2**24 - 1).to(torch.float32).mul_(2.0**-24)  # exact, never 0 nor an end
    return centered.erfinv_().mul_(math.sqrt(2.0))


def _shifted(bits: Tensor, count: int) -> Tensor:
    # The sign bit of an arithmetic shift is taken off again.
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


class perturbed:
    """Perturb what comes out of a model's word embeddings, in training and in evaluation, while the block lasts.

        with perturbed(model, gamma=0.5, padding_id=tokenizer.pad_token_id):
            trainer.train()

    Only texts given as ids are perturbed: embeddings that are handed to the model directly do not pass here. Where
    texts are counted, the attribute `next_sample` is the number of the next one: set it to draw again, or to go on
    where a training stopped.

    Args:
        model: a transformers model, a `TextUT`, or an `nn.Embedding`.
        gamma: γ ≥ 0 of `e + γ std(e) ε`, ε ~ N(0, 1), on all tokens; 0 changes nothing.
        seed: of the draws.
        std: std(e), one number; None: that of the whole embedding table as it is now, times the module's own
            `embed_scale` if it has one. Give it where the table is sharded.
        padding_id: the id of padding; None: the model's, if its config or embeddings have one.
        samples: the numbers of the texts that pass next, int64 `[texts]`; None: they are counted.

    InputError: an argument out of its range, or a model without word embeddings.
    """

    def __init__(
        self,
        model: nn.Module,
        gamma: float = 1.0,
        *,
        seed: int = 0,
        std: float | Tensor | None = None,
        padding_id: int | None = None,
        samples: Tensor | None = None,
    ) -> None:
        self._embedding = embedding = word_embeddings(model)
        if padding_id is not None:
            check_integer("padding_id", padding_id, 0)
        else:
            configured = getattr(getattr(model, "config", None), "pad_token_id", None)
            found = getattr(embedding, "padding_idx", None) if configured is None else configured
            padding_id = found if isinstance(found, int) and found >= 0 else None
        if std is None:
            table: Any = embedding.weight
            std = torch.std(table.detach().to(torch.promote_types(table.dtype, torch.float32)), correction=0)
            # Of a LoRA layer the base layer holds it; where a model scales by itself, it scales the noise too.
            scale = getattr(getattr(embedding, "base_layer", embedding), "embed_scale", None)
            std = std if scale is None else std.mul(scale)
        elif not isinstance(std, Tensor):
            std = torch.tensor(check_non_negative("std", std), dtype=torch.float64)
        self.gamma, self.seed = check_non_negative("gamma", gamma), check_integer("seed", seed, 0) % 2**62
        self.padding_id, self.std, self.samples, self.next_sample = padding_id, std.detach(), samples, 0
        self._drawn: tuple[Any, Any] = None, None  # `samples`, and what was drawn for them, for another gamma

    def __enter__(self) -> Self:
        self._handle = self._embedding.register_forward_hook(self._perturb, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _perturb(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], embedded: Any) -> Tensor:
        """Return the perturbed word embeddings `[..., T, width]` of texts of ids `[..., T]`, and count these."""
        if not isinstance(embedded, Tensor):  # I-BERT's come with their scale
            kind = type(module).__name__
            raise InputError(f"the word embeddings must be a tensor, got the {type(embedded).__name__} of {kind}")
        ids: Tensor = args[0] if args else kwargs["input"]
        tokens, samples = ids.reshape(-1, ids.shape[-1]), self.samples
        if samples is None:
            samples = torch.arange(self.next_sample, self.next_sample + len(tokens), device=ids.device)
            self.next_sample += len(tokens)
        if self.gamma == 0.0:
            return embedded
        before, noise = self._drawn
        if before is not samples or noise.shape != embedded.shape:
            noise = self._draw(tokens, samples, embedded.shape)
        if self.samples is not None:
            self._drawn = samples, noise
        std = self.std.to(embedded.device, torch.promote_types(embedded.dtype, torch.float32))
        return (self.gamma * std * noise).to(embedded.dtype).add_(embedded)

    def _draw(self, tokens: Tensor, samples: Tensor, shape: torch.Size) -> Tensor:
        """Return numbers of variance 1 in this shape, `[..., T, width]`, for texts of ids `[texts, T]`."""
        places = torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens)
        if self.padding_id is not None:  # padding on the left moves nothing
            leading = ((tokens != self.padding_id).cumsum(-1) == 0).sum(-1, keepdim=True)
            places = (places - leading).clamp(min=0)
        samples = samples.unsqueeze(-1)
        keys = hashed(hashed(torch.full_like(samples, self.seed), samples), places)  # a stream a token
        components = torch.arange(shape[-1], device=tokens.device)
        return unit_gaussian(hashed(keys.unsqueeze(-1), components)).view(shape)


def word_embeddings(model: nn.Module) -> nn.Module:
    """Return the module that turns ids into word embeddings, or InputError: `model` has none."""
    find: Any = getattr(model, "get_input_embeddings", None)
    found: Any = model if isinstance(model, nn.Embedding) else None
    if found is None and callable(find):
        with contextlib.suppress(NotImplementedError, AttributeError):  # of a model that hashes characters, as Canine
            found = find()
    if not isinstance(found, nn.Module) or not isinstance(getattr(found, "weight", None), Tensor):
        raise InputError(f"model must have word embeddings (get_input_embeddings()), got a {type(model).__name__}")
    return found
