"""Words as numbers, for a model without a pretrained tokenizer."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cdt_fast.checks import check_integer
from cdt_fast.errors import InputError
from cdt_fast.files import read_json, write_json

PADDING, UNKNOWN, SEPARATOR = "<pad>", "<unk>", "<sep>"

_SPECIAL = (PADDING, UNKNOWN, SEPARATOR)
_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


def words_of(text: str) -> list[str]:
    """The lower-case words (with their inner apostrophes) and punctuation marks of a text."""
    return _WORD.findall(text.lower())


class Vocabulary:
    """Words and their ids: 0 is padding, 1 an unknown word, 2 stands between the texts of a pair.

    Attributes:
        words: every word by its id.
        special_ids: the ids that no perturbation of words may touch: padding and the separator.

    Raises:
        InputError: the words do not start with the three special ones, or one is there twice.
    """

    special_ids = (0, 2)

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._ids = {word: index for index, word in enumerate(self.words)}
        if tuple(self.words[:3]) != _SPECIAL or len(self._ids) < len(self.words):
            raise InputError(f"words must be different ones, the first three {', '.join(_SPECIAL)}")

    @classmethod
    def build(cls, texts: Iterable[str], *, least: int = 1, size: int | None = None) -> Vocabulary:
        """The words of `texts`, the most frequent first.

        Args:
            texts: the training texts alone, both texts of pairs.
            least: how often a word has to occur.
            size: at most so many words, the three special ones included; None: all.
        """
        check_integer("least", least, 1)
        if size is not None:
            check_integer("size", size, len(_SPECIAL) + 1)
        counts = Counter(word for text in texts for word in words_of(text))
        # Among equals the alphabet decides, so that the order of the texts does not.
        ranked = sorted((word for word, count in counts.items() if count >= least), key=lambda w: (-counts[w], w))
        return cls([*_SPECIAL, *ranked][:size])

    def __len__(self) -> int:
        return len(self.words)

    def encode(
        self, texts: Sequence[str], text_pair: Sequence[str] | None = None, *, max_length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """`(ids, lengths)`: int64 `[B, T]`, padded on the right to the longest of them, and int64 `[B]`.

        Args:
            texts: B texts.
            text_pair: the second texts of pairs, behind a separator.
            max_length: texts are cut to so many tokens, the longer of a pair first; None: none is cut.

        Raises:
            InputError: no text, not as many second ones, or a text without a single word.
        """
        if not texts or (text_pair is not None and len(text_pair) != len(texts)):
            numbers = len(texts) if text_pair is None else f"{len(texts)} and {len(text_pair)}"
            raise InputError(f"texts must be at least one text, and text_pair as many, got {numbers}")
        if max_length is not None:
            check_integer("max_length", max_length, 1 if text_pair is None else 3)
        rows = []
        for index, text in enumerate(texts):
            first = [self._ids.get(word, 1) for word in words_of(text)]
            second = [] if text_pair is None else [self._ids.get(word, 1) for word in words_of(text_pair[index])]
            if not first or (text_pair is not None and not second):
                raise InputError(f"texts[{index}] holds no word: {text!r}")
            if text_pair is not None:
                room = None if max_length is None else max_length - 1
                while room is not None and len(first) + len(second) > room:
                    (first if len(first) > len(second) else second).pop()
                first = [*first, 2, *second]
            rows.append(torch.tensor(first[:max_length]))
        lengths = torch.tensor([len(row) for row in rows])
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0), lengths

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the words as a JSON list, atomically."""
        write_json(path, self.words)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read what `save` wrote.

        Raises:
            InputError: the file is missing, not whole, or no list of words.
        """
        words = read_json(path)
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise InputError(f"{path}: must hold a list of words")
        try:
            return cls(words)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
