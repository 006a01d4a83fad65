"""Texts and instructions as rows of token ids with their targets, and batches of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

IGNORED = -100  # the label of what does not count


@dataclass(frozen=True)
class EncodedSamples:
    """Samples as token ids.

    Attributes:
        rows: int64 `[fields, T]` each, see `tokenizers`.
        targets: int64, `[]` a class or `[T]` labels of tokens.
        counts: how many targets of each sample count.
    """

    rows: list[Tensor]
    targets: list[Tensor]
    counts: list[int]

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
