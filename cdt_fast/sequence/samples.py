"""Texts and instructions as rows of token ids with their targets, and batches of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cdt_fast.sequence.tokenizers import batch_encoding

IGNORED = -100  # the label of what does not count


@dataclass(frozen=True)
class EncodedSamples:
    """Samples as token ids.

    Attributes:
        rows: int64 `[fields, T]` each, as a `Tokenizer` gives them.
        targets: int64, `[]` a class or `[T]` labels of tokens.
        counts: how many targets of each sample count.
    """

    rows: list[Tensor]
    targets: list[Tensor]
    counts: list[int]

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, chosen: Sequence[int], padding_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs `[fields, B, T]` and targets `[B]` or `[B, T]`, filled up with −100, on `device`."""
        inputs = batch_encoding([self.rows[index] for index in chosen], padding_id)
        targets = [self.targets[index] for index in chosen]
        if targets[0].dim():
            labels = nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=IGNORED)
        else:
            labels = torch.stack(targets)
        return moved(inputs, device), moved(labels, device)

    def batches(self, size: int, padding_id: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Inputs, targets and how many of these count, `size` samples at a time, in order."""
        for start in range(0, len(self), size):
            chosen = range(start, min(start + size, len(self)))
            yield *self.batch(chosen, padding_id, device), sum(self.counts[index] for index in chosen)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`, without a host sync."""
    # From pageable memory the copy would synchronize with the host.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
