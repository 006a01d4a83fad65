"""Words as numbers, for a model without a pretrained tokenizer."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import regex
import torch
from torch import Tensor

from cdt_fast.checks import InputError, check_integer
from cdt_fast.files import read_json, write_json

WORDS = "vocabulary.json"
"""The file that they are in beside a model."""

_SPECIAL = ["<pad>", "<unk>", "<sep>"]
# Scripts written without blanks between words: each of their characters is a word, with the marks on it. Those of
# South East Asia are the line breaking class SA.
_UNSPACED = r"[\p{Han}\p{Hiragana}\p{scx=Katakana}\p{Bopomofo}\p{Yi}\p{Line_Break=SA}\p{Javanese}\p{Balinese}\p{Cham}]"
_SPACED = rf"[\w--{_UNSPACED}]"  # in `regex`, and not in `re`, the marks of Hindi, Arabic or a decomposed é are in \w
_WORD = regex.compile(rf"(?V1)[\w&&{_UNSPACED}]\p{{M}}*|{_SPACED}+(?:['’]{_SPACED}+)*|(?!\s)\X")  # \X: a whole emoji
_INVISIBLE = regex.compile(r"(?V1)[\p{Cf}--[\u200b-\u200d]]")  # but a blank of width zero, and what joins characters
_WORD_BEFORE = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


def words_of(text: str) -> list[str]:
    """The lower-case words (with their inner apostrophes) and punctuation marks of a text, in Unicode's form NFKC.

    A character of a script without blanks (Chinese, Japanese, Thai and others) is a word.
    """
    text = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text)).replace("\u200b", " ")
    return _WORD.findall(text.lower())


def _words_before(text: str) -> list[str]:
    """The words as vocabularies that were saved as a list have them."""
    return _WORD_BEFORE.findall(text.lower())


class Vocabulary:
    """Words and their ids: 0 is padding, 1 an unknown word, 2 stands between the texts of a pair.

    Attributes:
        words: every word by its id.
        version: 2; 1 of a vocabulary that was saved as a list, which splits texts as it did then.
        pad_token_id, unk_token_id, all_special_ids: as of a tokenizer of transformers: the id that fills up, that of
            unknown words, and those that are no words, padding and the separator.
    """

    pad_token_id = 0
    unk_token_id = 1
    all_special_ids = (0, 2)

    def __init__(self, words: Sequence[str], version: int = 2) -> None:
        self.words, self.version = list(words), version
        self._split = words_of if version == 2 else _words_before
        self._ids = {word: index for index, word in enumerate(self.words)}

    @classmethod
    def build(cls, texts: Iterable[str], *, least: int = 1, size: int | None = None) -> Vocabulary:
        """The words that occur `least` times in `texts`, most frequent first; at most `size`, special ones included."""
        counts = Counter(word for text in texts for word in words_of(text))
        # Among equals the alphabet decides, so that the order of the texts does not.
        ranked = sorted((word for word, count in counts.items() if count >= least), key=lambda w: (-counts[w], w))
        return cls([*_SPECIAL, *ranked][:size])

    def __len__(self) -> int:
        return len(self.words)

    def rows(
        self, texts: Sequence[str], text_pair: Sequence[str] | None = None, max_length: int | None = None
    ) -> list[Tensor]:
        """Of each text its ids and as many ones, int64 `[2, T]`; the second texts of pairs stand behind a separator.

        To `max_length` tokens texts are cut, the longer of a pair first. A text without a word is an InputError.
        """
        if max_length is not None:
            check_integer("max_length", max_length, 1 if text_pair is None else 3)
        rows = []
        for parts in zip(texts) if text_pair is None else zip(texts, text_pair, strict=True):
            ids = [[self._ids.get(word, self.unk_token_id) for word in self._split(text)] for text in parts]
            if not all(ids):
                raise InputError(f"holds no word: {parts[ids.index([])]!r}")
            while max_length is not None and sum(map(len, ids)) + len(ids) - 1 > max_length:
                max(reversed(ids), key=len).pop()
            joined = ids[0] if len(ids) == 1 else [*ids[0], 2, *ids[1]]
            rows.append(torch.stack([torch.tensor(joined), torch.ones(len(joined), dtype=torch.int64)]))
        return rows

    def encode(
        self, texts: Sequence[str], text_pair: Sequence[str] | None = None, *, max_length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """`(ids, lengths)`: int64 `[B, T]`, padded on the right to the longest of them, and `[B]`; see `rows`."""
        rows = [row[0] for row in self.rows(texts, text_pair, max_length)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the words as JSON, atomically."""
        write_json(path, self.words if self.version == 1 else {"version": self.version, "words": self.words})

    def save_pretrained(self, folder: Path) -> None:
        """Write the words to `folder`, as a tokenizer of transformers does."""
        self.save(folder / WORDS)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read what `save` wrote.

        Raises:
            InputError: the file is missing, not whole, of another version, or no such list of words.
        """
        content = read_json(path)
        version = 1 if isinstance(content, list) else 2
        if isinstance(content, dict):
            content = content.get("words") if content.get("version") == version else None
        words = content if isinstance(content, list) and all(isinstance(word, str) for word in content) else []
        if words[:3] != _SPECIAL or len(set(words)) < len(words):
            raise InputError(f"{path}: must hold different words, the first three {', '.join(_SPECIAL)}")
        return cls(words, version)
