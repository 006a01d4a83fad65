"""Networks that read rows of tokens and whose every depth can be read: `TextUT`, and transformers' models."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from cdt_fast.checksums import CHECKSUMS, checksums_of, write_checksums
from cdt_fast.errors import InputError
from cdt_fast.files import read_json, replaced_atomically, write_json
from cdt_fast.models import TextUT
from cdt_fast.models.layer_losses import attach_layer_losses
from cdt_fast.models.layer_losses.decoding.decoder import SpeculativeDecoder
from cdt_fast.models.layer_losses.decoding.tuning import Tuning
from cdt_fast.models.layer_losses.parts import LANGUAGE_MODEL, find_parts
from cdt_fast.ops.shared.backend import explain
from cdt_fast.sequence.perturbation import word_embeddings
from cdt_fast.sequence.tokenizers import Tokenizer

Weights = Tensor | Sequence[float] | None  # of the depths


class Network(Protocol):
    """A model, how it reads its batches, and how it is kept.

    Inputs are `[fields, B, T]` as `tokenizers.batch_encoding` gives them; targets are int64, `[B]` classes or `[B, T]`
    labels of tokens, those of −100 not counting.

    Attributes:
        model: the module whose weights train.
        layers: L, the depths that are read less one.
        padding_id, special_ids: of the ids that it reads; see `Tokenizer`.
    """

    model: nn.Module
    layers: int
    padding_id: int
    special_ids: Sequence[int]

    def losses(self, inputs: Tensor, targets: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        """`(total, per_depth)`: the losses of the depths `[L+1]`, means over what counts, and their weighted sum.

        Behind them, where the network was asked to measure it, the agreement of each depth with the last `[L+1]`.
        """
        ...

    def depth_logits(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """The logits of every depth, `[B, classes]` or `[B, T, vocabulary]`."""
        ...

    def save(self, folder: Path) -> None:
        """Write the model and what turns texts into ids to `folder`, in place of what is there."""
        ...

    def kernels(self, device: torch.device) -> str:
        """Which kernels a step runs on `device`, in words."""
        ...


class UnrolledNetwork:
    """A `TextUT`; see `Network`."""

    def __init__(self, model: TextUT, tokenizer: Tokenizer) -> None:
        self.model: nn.Module = model
        self._model, self._tokenizer = model, tokenizer
        self.layers, self.padding_id, self.special_ids = model.layers, tokenizer.padding_id, tokenizer.special_ids

    def losses(self, inputs: Tensor, targets: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        return self._model.layer_losses(inputs[0], targets, weights, lengths=inputs[1].sum(-1))

    def depth_logits(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        return self._model.depth_logits(inputs[0], lengths=inputs[1].sum(-1))

    def kernels(self, device: torch.device) -> str:
        return f"ops on {explain() if device.type == 'cuda' else 'torch'}"

    def save(self, folder: Path) -> None:
        with _replaced_folder(folder) as temporary:
            self._model.save_pretrained(temporary)
            self._tokenizer.save(temporary)


class PretrainedNetwork:
    """A classifier or causal language model of transformers with layer losses attached; see `Network`.

    Args:
        model: the model, maybe with a low-rank adapter around it.
        save_tokenizer: writes what turns texts into ids.
        padding_id, special_ids: as in `Network`.
        taps, inner_fraction, inner_pooling, inner_kl: as in `attach_layer_losses`; the last depth is among the taps.

    Raises:
        InputError: as `attach_layer_losses`, the last depth is not among the taps, or a language model does not shift
            its labels.
    """

    def __init__(
        self,
        model: Any,
        save_tokenizer: Callable[[Path], None],
        padding_id: int,
        special_ids: Sequence[int],
        taps: Sequence[int] | None = None,
        inner_fraction: float = 1.0,
        inner_pooling: Literal["own", "mean"] = "own",
        inner_kl: float = 0.0,
    ) -> None:
        self.model, self._save_tokenizer = model, save_tokenizer
        # Some tokenizers fill up with an id that the model has no embedding of: any other does, it is masked.
        self.padding_id = padding_id if padding_id < vocabulary_size(model) else 0
        self.special_ids = special_ids
        self._parts = find_parts(model)
        # Logits of all tokens are asked for where they are used, and there alone.
        self._handle = attach_layer_losses(
            model,
            taps,
            inner_fraction=inner_fraction,
            keep_logits=self._parts.kind != LANGUAGE_MODEL,
            inner_pooling=inner_pooling,
            inner_kl=inner_kl,
        )
        if self._parts.kind == LANGUAGE_MODEL and not self._handle.shifts_labels:
            raise InputError(
                f"{type(self._parts.model).__name__}: takes the label of a token as its own target, and the labels of "
                "instructions are those of the next; choose a causal language model that shifts them"
            )
        self.layers, last = self._handle.num_constraints, len(self._parts.layers)
        if self._handle.taps[-1] != last or self.layers < 1:
            raise InputError(f"[model] taps must be at least two depths that end with the last, {last}, got {taps}")

    def losses(self, inputs: Tensor, targets: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        output = self.model(**self._named(inputs), labels=targets, depth_weights=weights)
        return output.loss, output.layer_losses, *([output.layer_agreement] if self._handle.agreement_taps else [])

    def measure_agreement(self, depths: Iterable[int]) -> None:
        """Let `losses` give the agreement of some depths, of those that are read."""
        self._handle.agreement_taps = tuple(depths)

    def depth_logits(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        return self._handle.depth_logits(**self._named(inputs))

    @property
    def taps(self) -> tuple[int, ...]:
        """The depths that are read."""
        return self._handle.taps

    @property
    def layers_of_model(self) -> Sequence[nn.Module]:
        """All of its layers."""
        return self._parts.layers

    @property
    def base(self) -> Any:
        """The model of transformers, without an adapter's wrapper around it."""
        return self._parts.model

    def tune_decoder(
        self, prompts: Sequence[Tensor], new_tokens: int, draft_tokens: Tensor | None, progress: bool
    ) -> Tuning:
        """See `LayerLosses.tune_decoder`."""
        return self._handle.tune_decoder(prompts, new_tokens=new_tokens, draft_tokens=draft_tokens, progress=progress)

    def decoder(self) -> SpeculativeDecoder:
        """That of the settings which `tune_decoder` found."""
        return self._handle.decoder()

    @property
    def generation_config(self) -> Any:
        """Of the model, where the decoder's settings are."""
        return self.base.generation_config

    def save_generation(self, folder: Path) -> None:
        """Write the generation config to the `folder` of a saved model, beside an adapter too."""
        with _replaced_folder(folder) as temporary:
            self.generation_config.save_pretrained(temporary)

    def load_generation(self, folder: Path) -> None:
        """Take the generation config from where `save_generation` wrote it, if it did."""
        if (folder / "generation_config.json").exists():
            self.base.generation_config = type(self.generation_config).from_pretrained(folder)

    def _named(self, inputs: Tensor) -> dict[str, Any]:
        names = ("input_ids", "attention_mask", "token_type_ids")
        named: dict[str, Any] = dict(zip(names, inputs.unbind(), strict=False))
        return {**named, "use_cache": False} if self._parts.kind == LANGUAGE_MODEL else named

    def kernels(self, device: torch.device) -> str:
        return f"the losses of all depths on {explain() if device.type == 'cuda' else 'torch'}"

    def save(self, folder: Path) -> None:
        with _replaced_folder(folder) as temporary:
            # One file, so that it is replaced in one move.
            self.model.save_pretrained(temporary, max_shard_size="1000TB")
            if not (temporary / "config.json").exists():  # of an adapter
                self._parts.model.config.save_pretrained(temporary)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
            # Layer losses that are attached write this into the config; the saved model has none attached.
            config = read_json(temporary / "config.json")
            config.pop("keys_to_ignore_at_inference", None)
            write_json(temporary / "config.json", config)
            self._save_tokenizer(temporary)


def vocabulary_size(model: nn.Module) -> int:
    """How many word embeddings a model has."""
    table: Any = word_embeddings(model).weight
    return table.shape[0]


@contextmanager
def _replaced_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder whose files are moved to `folder`, with checksums, once the block has ended as it should."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".model-", suffix=".tmp", dir=folder.parent) as name:
        temporary = Path(name)
        yield temporary
        written = sorted(path.name for path in temporary.iterdir())
        checksums = checksums_of(temporary, written)
        if (folder / CHECKSUMS).exists():  # of files that stay
            before = read_json(folder / CHECKSUMS, dict[str, list[str]])
            checksums = {**{file: sums for file, sums in before.items() if (folder / file).exists()}, **checksums}
        # Until all are moved each may be the one before: whoever is killed meanwhile leaves a folder that can be read.
        there = checksums_of(folder, filter(lambda file: (folder / file).exists(), written))
        either = {file: list(dict.fromkeys(sums + there.get(file, []))) for file, sums in checksums.items()}
        write_checksums(folder, either)
        # What says that there is a model comes last.
        for file in sorted(written, key=lambda file: file == "config.json"):
            with replaced_atomically(folder / file) as target:
                shutil.copyfile(temporary / file, target)
        write_checksums(folder, checksums)
