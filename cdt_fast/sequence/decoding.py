"""What early exits make of a trained language model: a tuned decoder beside its weights, and how fast that decodes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses import frequent_tokens
from cdt_fast.models.layer_losses.decoding.tuning import EARLY_EXIT, TunedRow, timed_continuations
from cdt_fast.sequence.evaluation import KEPT
from cdt_fast.sequence.limits import positions_of
from cdt_fast.sequence.networks import PretrainedNetwork, replaced_folder
from cdt_fast.sequence.settings import LanguageSettings
from cdt_fast.sequence.tokenizers import IGNORED, EncodedSamples

_NEW_TOKENS = 32  # generated behind each prompt
_DRAFT_TOKENS = 8192
_ROUNDS = 3  # of the timing, in turns
_ASSISTANT = "assistant_early_exit"


def prompts_of(samples: EncodedSamples, count: int) -> list[Tensor]:
    """The tokens before the answer, of the first `count` samples that have some."""
    rows = zip(samples.rows[:count], samples.targets[:count], strict=True)
    asked = (row[0, : int((targets != IGNORED).nonzero()[0, 0])] for row, targets in rows)
    return [prompt for prompt in asked if len(prompt)]


def check_prompts(network: PretrainedNetwork, prompts: Sequence[Tensor], settings: LanguageSettings) -> None:
    """Require room for what is generated behind the prompts; the network is on the CPU."""
    longest = max(map(len, prompts), default=0)
    row = torch.ones(2, longest + _NEW_TOKENS, dtype=torch.int64)
    if longest and (positions := positions_of(network, row)) < row.shape[1]:
        raise InputError(
            f"[evaluation] prompts is {settings.evaluation.prompts}, and {_NEW_TOKENS} tokens behind a prompt of "
            f"{longest} are more than the {positions} positions of {settings.model.model}: give --prompts 0"
        )


def draft_tokens_of(samples: EncodedSamples, vocabulary: int) -> Tensor | None:
    """The tokens that an exit is to name: the most frequent labels, where that leaves out most of the vocabulary."""
    return frequent_tokens(samples.targets, _DRAFT_TOKENS) if vocabulary >= 2 * _DRAFT_TOKENS else None


def tune(
    network: PretrainedNetwork, prompts: Sequence[Tensor], draft_tokens: Tensor | None, folder: Path, progress: bool
) -> str:
    """Tune the decoder of the model in `folder` and write what was found beside it; what that is, in a sentence."""
    try:
        tuning = network.handle.tune_decoder(
            prompts, new_tokens=_NEW_TOKENS, draft_tokens=draft_tokens, progress=progress
        )
    except InputError as error:
        return f"no decoder is kept with the model: {error}"
    with replaced_folder(folder) as temporary:  # beside an adapter too
        network.base.generation_config.save_pretrained(temporary)
    fastest = max(tuning.rows, key=lambda row: row.measured or 0.0)
    gain = f"{fastest.measured:.2f} times as fast as the model alone, with exit {fastest.exit}"
    if tuning.best is None:
        return f"no decoder is kept with the model: at best it is {gain} on validation prompts"
    return f"a decoder is kept with the model, {gain} and {fastest.drafts} drafts on validation prompts"


def decoding_of(network: PretrainedNetwork, prompts: Sequence[Tensor], progress: bool) -> dict[str, Any]:
    """How well the exits of a language model draft behind prompts, and how fast the decoder kept with it is there."""
    if not prompts:
        return {}
    kept = getattr(network.base.generation_config, EARLY_EXIT, None)
    draft_tokens = None if kept is None or kept["draft_tokens"] is None else Tensor(kept["draft_tokens"]).long()
    try:
        tuning = network.handle.tune_decoder(
            prompts, new_tokens=_NEW_TOKENS, draft_tokens=draft_tokens, progress=progress
        )
    except InputError as error:
        return {"decoding_refused": str(error)}
    finally:
        setattr(network.base.generation_config, EARLY_EXIT, kept)  # what is measured is what validation prompts chose
    best: dict[int, TunedRow] = {}
    for row in tuning.rows:
        best.setdefault(row.exit, row)
    shown = [asdict(row) for _, row in sorted(best.items())]
    speeds = [] if kept is None else speeds_of(network, prompts, kept["exit"])
    return {"decoding": shown, "tokens_per_second": tuning.tokens_per_second, "speeds": speeds}


def speeds_of(network: PretrainedNetwork, prompts: Sequence[Tensor], exit: int) -> list[dict[str, Any]]:
    """Tokens a second over those of the model alone, in turns with it: of the decoder kept with the model, and of
    transformers' own early exit at the same depth, where the model is one that it runs."""
    decoder = network.handle.decoder()
    ways: dict[str, dict[str, Any]] = {KEPT: {"custom_generate": decoder}, _ASSISTANT: {"assistant_early_exit": exit}}
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    layers = network.base.config.num_hidden_layers
    for _ in range(_ROUNDS):
        tokens, seconds = timed_continuations(network.base, prompts, _NEW_TOKENS)
        for name, options in list(ways.items()):
            try:
                own_tokens, own_seconds = timed_continuations(network.base, prompts, _NEW_TOKENS, **options)
            except (IndexError, ValueError, NotImplementedError):
                network.base.config.num_hidden_layers = layers  # which transformers leaves changed then
                del ways[name], ratios[name]
                continue
            ratios[name].append(own_tokens / own_seconds * seconds / tokens)
    acceptance = {KEPT: decoder.counts.acceptance} if decoder.counts.drafted else {}
    return [
        {
            "name": name,
            "median": statistics.median(found),
            "least": min(found),
            "most": max(found),
            "acceptance": acceptance.get(name),
        }
        for name, found in ratios.items()
    ]
