"""Texts as rows of token ids, by words, byte pairs or a pretrained model's tokenizer, and batches of such rows.

A row is int64 `[fields, T]`: ids, ones, and where the model has them the token types.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.checks import InputError, require
from cdt_fast.sequence.data.vocabulary import WORDS, Vocabulary
from cdt_fast.training.execution import to_device

END, PADDING = "<|end|>", "<|padding|>"  # of `learned_tokenizer`
IGNORED = -100  # the label of what does not count
_NO_LIMIT = 10**6  # tokenizers say "no limit" by an absurdly large number


@dataclass(frozen=True)
class EncodedSamples:
    """Samples as token ids."""

    rows: list[Tensor]  # int64 `[fields, T]` each
    targets: list[Tensor]  # int64, `[]` a class or `[T]` labels of tokens
    counts: list[int]  # how many targets of each sample count

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, chosen: Sequence[int], padding_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs `[fields, B, T]`, filled up with `padding_id` and zeros, and targets `[B]` or `[B, T]`, with −100."""
        rows = [self.rows[index] for index in chosen]
        inputs = rows[0].new_zeros(rows[0].shape[0], len(rows), max(row.shape[1] for row in rows))
        inputs[0] = padding_id
        for number, row in enumerate(rows):
            inputs[:, number, : row.shape[1]] = row
        targets = [self.targets[index] for index in chosen]
        if targets[0].dim():
            labels = nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=IGNORED)
        else:
            labels = torch.stack(targets)
        return to_device(inputs, device), to_device(labels, device)

    def batches(self, size: int, padding_id: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Inputs, targets and how many of these count, `size` samples at a time, in order."""
        for start in range(0, len(self), size):
            chosen = range(start, min(start + size, len(self)))
            yield *self.batch(chosen, padding_id, device), sum(self.counts[index] for index in chosen)


def rows_of(tokenizer: Any, texts: Sequence[str], text_pair: Sequence[str] | None, max_length: int) -> list[Tensor]:
    """A row a text, or a pair of texts, cut to `max_length` tokens, by a `Vocabulary` or transformers' tokenizer."""
    if isinstance(tokenizer, Vocabulary):
        return tokenizer.rows(texts, text_pair, max_length)
    if tokenizer.model_max_length < _NO_LIMIT:
        max_length = min(max_length, tokenizer.model_max_length)
    encoded = tokenizer(texts, text_pair, truncation=True, max_length=max_length)
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in encoded]
    return [torch.tensor(row, dtype=torch.int64) for row in zip(*(encoded[name] for name in names), strict=True)]


def learned_tokenizer(texts: Iterable[str], size: int) -> Any:
    """Byte pairs learned from texts: the end, what fills up, the 256 bytes, and the pairs that are most frequent.

    The same texts give the same tokens, whatever their order, and no text is beyond them. There are at most `size` of
    them, ≥ 258, where every byte of UTF-8 is a token of its own.
    """
    transformers = pretrained_library()
    from tokenizers import Tokenizer as BytePairs
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = BytePairs(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PADDING)


@contextlib.contextmanager
def from_hub(name: str, download: bool) -> Iterator[dict[str, Any]]:
    """Arguments of `from_pretrained` for the model `name`; what fails inside says how to give a folder instead.

    Raises:
        InputError: the model is not there, cannot be fetched, or cannot be read.
    """
    try:
        yield {"local_files_only": not download, "trust_remote_code": False}  # no code of a folder runs
    except InputError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
            raise InputError(f"{name}: holds no config.json; expected a folder that save_pretrained wrote") from error
        # The beginning of the reason: transformers likes to list all the models it has.
        reason = textwrap.shorten(str(error), 240, placeholder=" …")
        if not Path(name).is_dir():
            reason += "; give the path of a local folder" + ("" if download else ", or --download")
        raise InputError(f"{name}: cannot be loaded as a transformers model ({reason})") from error


def pretrained_library() -> Any:
    """The package transformers, without its own reports and bars on stderr."""
    transformers = require("transformers", "transformers", "a pretrained model")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def load_tokenizer(name: str, download: bool) -> Any:
    """The tokenizer of a pretrained model in a folder or on the hub, with a token to fill up with.

    Raises:
        InputError: there is none, it knows no words, or has no token to fill up with.
        MissingExtra: transformers is not installed.
    """
    transformers = pretrained_library()
    with from_hub(name, download) as where:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **where)
    # Of a folder without a tokenizer's files transformers makes one that reads every word as unknown.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise InputError(f"{name}: holds no tokenizer (tokenizer.json, or the files of its kind)")
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise InputError(f"{name}: the tokenizer has neither a padding nor an end token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_saved_tokenizer(folder: Path) -> Any:
    """The tokenizer that a run saved beside its model, or InputError: there is none."""
    words = folder / WORDS
    return Vocabulary.load(words) if words.exists() else load_tokenizer(str(folder), download=False)
