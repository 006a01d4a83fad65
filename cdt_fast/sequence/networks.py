"""Networks that read rows of tokens and whose every depth can be read: `TextUT`, and transformers' models."""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.checks import InputError
from cdt_fast.checksums import CHECKSUMS, checksums_of
from cdt_fast.files import read_json, replaced_atomically, write_json
from cdt_fast.models import TextUT
from cdt_fast.models.layer_losses import attach_layer_losses
from cdt_fast.ops.common import explain
from cdt_fast.sequence.perturbation import Perturbation, perturbed, word_embeddings
from cdt_fast.sequence.settings import SequenceSettings

EVALUATION_SEED = 20_260_117  # noise of the evaluation: the same for every run, and apart from that of any training

Weights = Tensor | Sequence[float] | None  # of the depths


class Network(ABC):
    """A model, how it reads its batches, and how it is kept.

    Inputs are `[fields, B, T]`, see `tokenizers`; targets are int64, `[B]` classes or `[B, T]` labels of tokens, where
    −100 does not count.

    Attributes:
        model: the module whose weights train.
        tokenizer: what turns texts into ids, a `Vocabulary` or a tokenizer of transformers.
        depths: those that are read, in layers.
        padding_id: the id that fills up.
    """

    part: str  # of a step, that runs on the kernels

    def __init__(self, model: nn.Module, tokenizer: Any, depths: Sequence[int]) -> None:
        self.model, self.tokenizer, self.depths = model, tokenizer, depths
        # Some tokenizers fill up with an id that the model has no embedding of: any other does, it is masked.
        ids = (tokenizer.pad_token_id, getattr(tokenizer, "eos_token_id", None), 0)
        self.padding_id: int = next(index for index in ids if index is not None and index < vocabulary_size(model))

    @property
    def layers(self) -> int:
        """L, the depths that are read less one."""
        return len(self.depths) - 1

    @abstractmethod
    def losses(self, inputs: Tensor, targets: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        """`(total, per_depth)`: the losses of the depths `[L+1]`, means over what counts, and their weighted sum."""

    @abstractmethod
    def depth_logits(self, inputs: Tensor) -> list[Tensor]:
        """The logits of every depth, `[B, classes]` or `[B, T, vocabulary]`."""

    def perturbed(
        self, settings: SequenceSettings, gamma: float | None = None, **options: Any
    ) -> AbstractContextManager[Perturbation]:
        """`perturbed` by the settings, at the training noise where `gamma` names no other, with the seed of the
        evaluation where `options` name none."""
        return perturbed(
            self.model,
            settings.noise if gamma is None else gamma,
            padding_id=self.padding_id,
            **{"seed": EVALUATION_SEED, **options},
        )

    @abstractmethod
    def save_model(self, folder: Path) -> None:
        """Write the model alone to an empty `folder`."""

    def save(self, folder: Path) -> None:
        """Write the model and what turns texts into ids to `folder`, in place of what is there."""
        with replaced_folder(folder) as temporary:
            self.save_model(temporary)
            self.tokenizer.save_pretrained(temporary)

    def kernels(self, device: torch.device) -> str:
        """Which kernels a step runs on `device`, in words."""
        return f"{self.part} on {explain() if device.type == 'cuda' else 'torch'}"


class UnrolledNetwork(Network):
    """A `TextUT`; see `Network`."""

    part = "ops"
    model: TextUT

    def __init__(self, model: TextUT, tokenizer: Any) -> None:
        super().__init__(model, tokenizer, range(model.layers + 1))

    def losses(self, inputs: Tensor, targets: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        return self.model.layer_losses(inputs[0], targets, weights, lengths=inputs[1].sum(-1))

    def depth_logits(self, inputs: Tensor) -> list[Tensor]:
        return self.model.depth_logits(inputs[0], lengths=inputs[1].sum(-1))

    def save_model(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


class PretrainedNetwork(Network):
    """A classifier or causal language model of transformers with layer losses attached; see `Network`.

    Args:
        model: the model, maybe with a low-rank adapter around it.
        tokenizer: its tokenizer.
        taps, options: as in `attach_layer_losses`; the last depth is among the taps.

    Attributes:
        base: the model of transformers, without an adapter's wrapper around it.
        handle: the layer losses.

    Raises:
        InputError: as `attach_layer_losses`, the last depth is not among the taps, or a language model does not shift
            its labels.
    """

    part = "the losses of all depths"

    def __init__(self, model: Any, tokenizer: Any, taps: Sequence[int] | None = None, **options: Any) -> None:
        self.handle = attach_layer_losses(model, taps, **options)
        self.base: Any = self.handle.model
        if self.handle.reads_tokens and not self.handle.shifts_labels:
            raise InputError(
                f"{type(self.base).__name__}: takes the label of a token as its own target, and the labels of "
                "instructions are those of the next; choose a causal language model that shifts them"
            )
        super().__init__(model, tokenizer, self.handle.taps)
        if self.depths[-1] != self.handle.layers or self.layers < 1:
            raise InputError(
                f"[model] taps must be at least two depths that end with the last, {self.handle.layers}, got {taps}"
            )

    def forward(self, inputs: Tensor) -> None:
        """The model's own forward, without labels."""
        self.model(**self._named(inputs))

    def losses(self, inputs: Tensor, targets: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        output = self.model(**self._named(inputs), labels=targets, depth_weights=weights)
        return output.loss, output.layer_losses

    def depth_logits(self, inputs: Tensor) -> list[Tensor]:
        return self.handle.depth_logits(**self._named(inputs))

    def save_model(self, folder: Path) -> None:
        # One file, so that it is replaced in one move.
        self.model.save_pretrained(folder, max_shard_size="1000TB")  # pyright: ignore[reportCallIssue]
        if not (folder / "config.json").exists():  # of an adapter
            self.base.config.save_pretrained(folder)
        # Layer losses that are attached write this into the config; the saved model has none attached.
        config = read_json(folder / "config.json")
        config.pop("keys_to_ignore_at_inference", None)
        write_json(folder / "config.json", config)

    def _named(self, inputs: Tensor) -> dict[str, Any]:
        names = ("input_ids", "attention_mask", "token_type_ids")
        named: dict[str, Any] = dict(zip(names, inputs.unbind(), strict=False))
        return {**named, "use_cache": False} if self.handle.reads_tokens else named


def vocabulary_size(model: nn.Module) -> int:
    """How many word embeddings a model has."""
    table: Any = word_embeddings(model).weight
    return table.shape[0]


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder whose files are moved to `folder`, with checksums, once the block has ended as it should."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".model-", suffix=".tmp", dir=folder.parent) as name:
        temporary = Path(name)
        yield temporary
        written = checksums_of(temporary, (path.name for path in temporary.iterdir()))
        before = read_json(folder / CHECKSUMS, dict[str, list[str]]) if (folder / CHECKSUMS).exists() else {}
        # Until all are moved each may be the one before: whoever is killed meanwhile leaves a folder that can be read.
        either = {file: list(dict.fromkeys(sums + before.get(file, []))) for file, sums in written.items()}
        write_json(folder / CHECKSUMS, {**before, **either})
        # What says that there is a model comes last.
        for file in sorted(written, key=lambda file: file == "config.json"):
            with replaced_atomically(folder / file) as target:
                shutil.copyfile(temporary / file, target)
        write_json(folder / CHECKSUMS, {**before, **written})
