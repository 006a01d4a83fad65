"""Texts as rows of token ids, by words or by a pretrained model's tokenizer, and what is loaded of transformers.

A row is int64 `[fields, T]`: ids, ones, and for some models the token types.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdt_fast.checks import InputError, require
from cdt_fast.models.transformers_weights import load_complete, named_errors
from cdt_fast.sequence.data import Instruction, TextData
from cdt_fast.training.execution import to_device

IGNORED = -100  # the label of what does not count
# Scripts written without blanks between words: each of their characters is a word, with the marks on it.
_SCRIPTS = "Han Hiragana Katakana Bopomofo Yi Thai Lao Khmer Myanmar Tai_Le New_Tai_Lue"
_SCRIPTS += " Tai_Tham Tai_Viet Ahom Javanese Balinese Cham"
_UNSPACED = "".join(rf"\p{{{script}}}" for script in _SCRIPTS.split()) + "ー々〆"
_SPACED = rf"[\w&&[^{_UNSPACED}]]"
_WORD = rf"[\w&&[{_UNSPACED}]]\p{{M}}*|{_SPACED}+(?:['’]{_SPACED}+)*|(?!\s)\X"  # \X: a whole emoji
_INVISIBLE = r"[\p{Cf}&&[^\x{200c}\x{200d}]]"  # but what joins characters


@dataclass(frozen=True)
class EncodedSamples:
    """Samples as token ids."""

    rows: list[Tensor]  # int64 `[fields, T]` each
    targets: list[Tensor]  # int64, `[]` a class or `[T]` labels of tokens
    counts: list[int]  # how many targets of each sample count

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, chosen: Sequence[int], padding_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return inputs `[fields, B, T]`, filled up with `padding_id` and zeros, and targets `[B]` or `[B, T]`."""
        rows, targets = ([column[index] for index in chosen] for column in (self.rows, self.targets))
        inputs = rows[0].new_zeros(rows[0].shape[0], len(rows), max(row.shape[1] for row in rows))
        inputs[0] = padding_id
        for number, row in enumerate(rows):
            inputs[:, number, : row.shape[1]] = row
        if targets[0].dim():
            labels = nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=IGNORED)
        else:
            labels = torch.stack(targets)
        return to_device(inputs, device), to_device(labels, device)

    def batches(self, size: int, padding_id: int, device: torch.device) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Yield the numbers of `size` samples at a time, their inputs and targets. The longest come first: samples of
        about one length together need next to no padding."""
        order = sorted(range(len(self)), key=lambda index: -self.rows[index].shape[1])
        for start in range(0, len(self), size):
            chosen = order[start : start + size]
            yield chosen, *self.batch(chosen, padding_id, device)


def encoded_texts(data: TextData, tokenizer: Any, max_length: int) -> EncodedSamples:
    """Return a row of at most `max_length` tokens for each text or pair; InputError: one holds no token."""
    longest = min(max_length, tokenizer.model_max_length)
    encoded = tokenizer(data.texts, data.text_pair, truncation=True, max_length=longest)
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in encoded]
    rows = [torch.tensor(row, dtype=torch.int64) for row in zip(*(encoded[name] for name in names), strict=True)]
    for row, text in zip(rows, data.texts, strict=True):
        if not row.shape[1]:
            raise InputError(f"holds no word: {text!r}")
    return EncodedSamples(rows, list(torch.tensor(data.labels).unbind()), [1] * len(rows))


def encoded_instructions(
    instructions: Sequence[Instruction], tokenizer: Any, max_length: int, part: str
) -> EncodedSamples:
    """Return prompt, answer and end token as one row of at most `max_length` tokens; the prompt's labels are −100.
    Instructions with no answer left are not there; a whole `part` without any is an InputError."""
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError(f"{tokenizer.name_or_path}: the tokenizer has no end token to put behind an answer")
    samples = []
    for entry in instructions:
        prompt = tokenizer(entry.prompt)["input_ids"]
        if prompt and prompt[-1] == end:
            prompt = prompt[:-1]  # some tokenizers append it
        answer = [*tokenizer(entry.output, add_special_tokens=False)["input_ids"], end]
        ids = torch.tensor((prompt + answer)[:max_length], dtype=torch.int64)
        labels = ids.clone()
        labels[: len(prompt)] = IGNORED
        if count := int((labels[1:] != IGNORED).sum()):  # the first token of a sequence is not predicted
            samples.append((torch.stack([ids, torch.ones_like(ids)]), labels, count))
    if not samples:
        raise InputError(
            f"[data] max_tokens is {max_length}: the prompts of all {len(instructions):,} {part} instructions are as "
            "long as that, so that all tokens are masked; raise --max-tokens"
        )
    return EncodedSamples(*map(list, zip(*samples, strict=True)))


def word_tokenizer(texts: Iterable[str], least: int = 1) -> Any:
    """Return a tokenizer of transformers by lower-case words, with inner apostrophes, and punctuation marks, in NFKC. A
    character of a script without blanks (Chinese, Japanese, Thai and others) is a word. The vocabulary are the words
    that occur `least` times in `texts`, most frequent first, after padding, unknown words and what separates a pair."""
    transformers = _transformers()
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer: Any = Tokenizer(models.WordLevel(unk_token="<unk>"))
    steps = normalizers.Replace("\u200b", " "), normalizers.Replace(Regex(_INVISIBLE), ""), normalizers.Lowercase()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), *steps])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD), "removed", invert=True)
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "sep_token": "<sep>"}
    options = {"vocab_size": 2**31, "min_frequency": least, "special_tokens": list(special.values())}
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(show_progress=False, **options))
    tokenizer.post_processor = processors.TemplateProcessing("$A", "$A <sep> $B", [("<sep>", 2)])
    fields = ["input_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=fields, **special)


def load_tokenizer(name: str | Path, download: bool = False) -> Any:
    """Load the tokenizer in a folder or on the hub, with a padding token."""
    with from_hub(name, download) as (transformers, where):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **where)
    # Of a folder without a tokenizer's files transformers makes one that reads every word as unknown.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise InputError(f"{name}: holds no tokenizer (tokenizer.json, or the files of its kind)")
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise InputError(f"{name}: the tokenizer has neither a padding nor an end token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(kind: str, name: str | Path, download: bool = False, **options: Any) -> Any:
    """Load a model by one of transformers' Auto classes in float32, complete; options and errors: `load_complete`."""
    with from_hub(name, download) as (transformers, where):
        return load_complete(getattr(transformers, kind), name, dtype=torch.float32, **where, **options)


@contextlib.contextmanager
def from_hub(name: str | Path, download: bool = False) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield transformers and arguments of its `from_pretrained`; errors of the block say how to give a folder."""
    transformers = _transformers()
    other = "" if Path(name).is_dir() else "; give the path of a local folder" + ("" if download else ", or --download")
    with named_errors(name, other):
        yield transformers, {"local_files_only": not download, "trust_remote_code": False}  # no code of a folder runs


def _transformers() -> Any:
    """Return the package transformers, without its own reports and bars on stderr."""
    transformers = require("transformers", "transformers", "training on texts")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
