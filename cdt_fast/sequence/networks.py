"""Networks that read rows of tokens and whose every depth can be read: `TextUT`, and transformers' models."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.checks import InputError
from cdt_fast.models import TextUT
from cdt_fast.models.layer_losses import attach_layer_losses
from cdt_fast.ops.common import Weights
from cdt_fast.sequence.perturbation import perturbed, word_embeddings
from cdt_fast.sequence.settings import SequenceSettings
from cdt_fast.sequence.tokenizers import EncodedSamples

EVALUATION_SEED = 20_260_117  # noise of the evaluation: the same for every run, and apart from that of any training
_MAX_UNKNOWN = 1 / 3


class _Network:
    """A model that reads batches of a tokenizer, L its depths that are read less one; the subclasses say how. Inputs
    are `[fields, B, T]`; targets int64, `[B]` classes or `[B, T]` labels of tokens, where −100 does not count."""

    def __init__(self, model: nn.Module, tokenizer: Any, layers: int) -> None:
        self.model, self.tokenizer, self.layers = model, tokenizer, layers
        # Some tokenizers fill up with an id that the model has no embedding of: any other does, it is masked.
        ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.padding_id: int = next(index for index in ids if index is not None and index < self.vocabulary)

    @property
    def vocabulary(self) -> int:
        """Return how many word embeddings the model has."""
        table: Any = word_embeddings(self.model).weight
        return table.shape[0]

    def perturbed(self, settings: SequenceSettings, seed: int = EVALUATION_SEED, samples: Tensor | None = None) -> Any:
        """Perturb at the training noise of the settings, by default with the seed of the evaluation."""
        return perturbed(self.model, settings.data.gamma, seed=seed, padding_id=self.padding_id, samples=samples)

    def save(self, folder: Path) -> None:
        """Write the model and its tokenizer to `folder`, in place of what is there."""
        model: Any = self.model
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".model-", suffix=".tmp", dir=folder.parent) as temporary:
            new = Path(temporary) / "new"
            model.save_pretrained(new)
            self.tokenizer.save_pretrained(new)
            if folder.exists():
                folder.rename(Path(temporary) / "old")
            new.rename(folder)


class UnrolledNetwork(_Network):
    """A `TextUT` and its tokenizer."""

    model: TextUT

    def __init__(self, model: TextUT, tokenizer: Any) -> None:
        super().__init__(model, tokenizer, model.layers)

    def losses(self, inputs: Tensor, targets: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        """Return `(total, per_depth)`: the mean losses of the depths `[L+1]`, and their weighted sum."""
        return self.model.layer_losses(inputs[0], targets, weights, lengths=_lengths(inputs[1]))[:2]

    def depth_logits(self, inputs: Tensor) -> list[Tensor]:
        """Return the logits of every depth, `[B, classes]`."""
        return self.model.depth_logits(inputs[0], lengths=_lengths(inputs[1]))


def _lengths(mask: Tensor) -> Tensor | None:
    """Return how many tokens of each text count, or None where the host can see that all do."""
    return None if mask.device.type == "cpu" and bool(mask.all()) else mask.sum(-1)


class PretrainedNetwork(_Network):
    """A transformers model with layer losses attached at `taps`, which end with the last depth, and its tokenizer."""

    def __init__(self, model: Any, tokenizer: Any, taps: Sequence[int] | None = None, **options: Any) -> None:
        self.handle = attach_layer_losses(model, taps, **options)
        if self.handle.reads_tokens and not self.handle.shifts_labels:
            advice = "choose a causal language model that shifts them, as instructions need"
            raise InputError(f"{type(model).__name__}: takes the label of a token as its own target; {advice}")
        super().__init__(model, tokenizer, self.handle.num_constraints)
        if self.handle.taps[-1] != self.handle.layers or self.layers < 1:
            expected = f"at least two depths that end with the last, {self.handle.layers}"
            raise InputError(f"[model] taps must be {expected}, got {taps}")

    def losses(self, inputs: Tensor, targets: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        """Return `(total, per_depth)`: the mean losses of the depths `[L+1]`, and their weighted sum."""
        self.handle.weights = weights
        output = self.model(**self._named(inputs), labels=targets)
        return output.loss, output.layer_losses

    def depth_logits(self, inputs: Tensor) -> list[Tensor]:
        """Return the logits of every depth, `[B, classes]` or `[B, T, vocabulary]`."""
        return self.handle.depth_logits(**self._named(inputs))

    def _named(self, inputs: Tensor) -> dict[str, Any]:
        names = ("input_ids", "attention_mask", "token_type_ids")
        named: dict[str, Any] = dict(zip(names, inputs.unbind(), strict=False))
        return {**named, "use_cache": False} if self.handle.reads_tokens else named


Network = UnrolledNetwork | PretrainedNetwork


@torch.no_grad()
def check_rows(network: Network, parts: Sequence[EncodedSamples], settings: SequenceSettings) -> None:
    """Require that the network, which is on the CPU, takes every row of the data."""
    # Configurations do not say all limits of a model: it reads the longest row, and those of the largest id and type.
    samples = [(row, target) for part in parts for row, target in zip(part.rows, part.targets, strict=True)]
    sizes = [(row.shape[1], int(row[0].max()), int(row[2:].sum())) for row, _ in samples]
    chosen = {max(range(len(sizes)), key=lambda index: sizes[index][column]) for column in range(3)}
    few = EncodedSamples(*map(list, zip(*(samples[index] for index in sorted(chosen)), strict=True)), counts=[])
    batch = few.batch(range(len(chosen)), network.padding_id, torch.device("cpu"))
    try:
        with torch.random.fork_rng(devices=[]):
            network.losses(*batch, None)
    except Exception as error:  # any: the code is not ours
        if isinstance(error, MemoryError) or "memory" in str(error):
            raise
        if isinstance(error, InputError) and error.__cause__ is None:  # of its structure, whatever the rows
            raise InputError(f"{settings.model.model}: {error}") from error
        longest, largest, _ = map(max, zip(*sizes, strict=True))
        raise InputError(
            f"{settings.model.model}: cannot read rows of up to {longest} tokens, ids up to {largest} "
            f"({type(error).__name__}: {error}); if it has fewer positions, give a smaller --max-tokens; if its "
            f"{network.vocabulary} word embeddings are not those of its tokenizer, another folder"
        ) from error


def unknown_words(tokenizer: Any, held_out: Sequence[EncodedSamples], remedy: str) -> str | None:
    """Return a note where the tokenizer knows too few of the words of held-out samples, else None."""
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown in (tokenizer.eos_token_id, tokenizer.pad_token_id):
        return None
    ids = torch.cat([row[0] for part in held_out for row in part.rows])
    special = torch.tensor([index for index in tokenizer.all_special_ids if index != unknown])
    words = ids[~torch.isin(ids, special)]
    share = (words == unknown).double().mean().item() if len(words) else 0.0
    if share <= _MAX_UNKNOWN:
        return None
    return f"note: {share:.0%} of the words of the validation and test texts are unknown to the vocabulary ({remedy})"
