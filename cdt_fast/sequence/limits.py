"""What a network can read: token ids, token types and lengths, and how many words of a text it knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cdt_fast.checks import InputError
from cdt_fast.sequence.data.vocabulary import Vocabulary
from cdt_fast.sequence.networks import Network, PretrainedNetwork, vocabulary_size
from cdt_fast.sequence.settings import SequenceSettings
from cdt_fast.sequence.tokenizers import EncodedSamples

_MOST_UNKNOWN = 1 / 3


def check_rows(network: Network, parts: Sequence[EncodedSamples], settings: SequenceSettings) -> None:
    """Require that the network, which is on the CPU, takes every row of the data.

    Configurations do not say that of all models: a pretrained model reads the longest row and the one of the largest
    token type, and one that fails is shortened until it does not.

    Raises:
        InputError: it does not; the message names the setting and the most that it takes.
    """
    rows = [row for part in parts for row in part.rows]
    size, largest = vocabulary_size(network.model), max(int(row[0].max()) for row in rows)
    if largest >= size:
        raise InputError(
            f"the tokenizer gives ids up to {largest}, but the model has {size} word embeddings: give a folder whose "
            "tokenizer belongs to its model"
        )
    if not isinstance(network, PretrainedNetwork):
        return
    name, most = settings.model.model, settings.data.max_tokens
    typed = max(rows, key=lambda row: int(row[2:].sum()))
    untyped = max(rows, key=lambda row: row.shape[1]).clone()
    untyped[2:] = 0
    positions = positions_of(network, untyped)
    if positions < untyped.shape[1]:
        raise InputError(
            f"[data] max_tokens is {most}, but {name} has {positions} positions, and the longest row of the data has "
            f"{untyped.shape[1]} tokens: give --max-tokens {positions}"
        )
    if typed[2:].any() and not _takes(network, typed):
        raise InputError(
            f"the tokenizer of {name} gives token types up to {int(typed[2:].max())}, of which the model has fewer "
            "embeddings: give a folder whose tokenizer belongs to its model"
        )


def positions_of(network: PretrainedNetwork, row: Tensor) -> int:
    """How many tokens of a row `[fields, T]` the model takes: T where that is all, or where it takes not even one."""
    length = row.shape[1]
    if _takes(network, row):
        return length
    taken, refused = 0, length
    while refused - taken > 1:
        middle = (taken + refused) // 2
        taken, refused = (middle, refused) if _takes(network, row[:, :middle]) else (taken, middle)
    return taken or length  # it is not the length then, and training will say what it is


@torch.no_grad()
def _takes(network: PretrainedNetwork, row: Tensor) -> bool:
    training = network.model.training
    network.model.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            network.forward(row.unsqueeze(1))
    except Exception as error:  # any: the code is not ours
        if isinstance(error, MemoryError) or "memory" in str(error):
            raise
        return False
    finally:
        network.model.train(training)
    return True


def unknown_words(tokenizer: Any, held_out: Sequence[EncodedSamples]) -> str | None:
    """A note where the tokenizer knows too few of the words of held-out samples; else None."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    others = [getattr(tokenizer, f"{name}_token_id", None) for name in ("eos", "pad")]
    if unknown is None or unknown in others:
        return None
    ids = torch.cat([row[0] for part in held_out for row in part.rows])
    special = torch.tensor([index for index in tokenizer.all_special_ids if index != unknown])
    words = ids[~torch.isin(ids, special)]
    share = (words == unknown).double().mean().item() if len(words) else 0.0
    if share <= _MOST_UNKNOWN:
        return None
    remedy = "--least-count 1 takes the rare ones in" if isinstance(tokenizer, Vocabulary) else "take another --model"
    return f"note: {share:.0%} of the words of the validation and test texts are unknown to the vocabulary ({remedy})"
