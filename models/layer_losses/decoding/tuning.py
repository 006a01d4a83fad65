"""Which exit and how many drafts decode fastest: counted on held-out prompts, predicted, then measured."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from cdt_fast.checks import check_integer
from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses.decoding.decoder import SpeculativeDecoder
from cdt_fast.models.layer_losses.decoding.split import SplitModel
from cdt_fast.models.layer_losses.first_forward import without_dropout
from cdt_fast.models.layer_losses.parts import ModelParts
from cdt_fast.models.layer_losses.patch import state_of
from cdt_fast.ops.shared.checks import describe

EARLY_EXIT = "early_exit"
"""The entry of a model's `generation_config` that a decoder takes its settings from."""

_DRAFTS = (1, 2, 3, 4, 5, 6, 8, 10)
_CONFIDENCES = (0.0, 0.3, 0.5, 0.7, 0.9)
_MEASURED = 3
_REPETITIONS = 5
_LEAST_GAIN = 1.05  # less may be the timing's own spread


@dataclass(frozen=True)
class ExitSettings:
    """What a `SpeculativeDecoder` is made with; kept in `generation_config.early_exit`.

    Attributes:
        exit: the depth that drafts.
        drafts: the most tokens of a round.
        confidence: a round ends before a draft of less probability.
        draft_tokens: the tokens that the exit can name; None: all.
    """

    exit: int
    drafts: int
    confidence: float = 0.0
    draft_tokens: list[int] | None = None


@dataclass(frozen=True)
class TunedRow:
    """One setting, over all prompts.

    Attributes:
        exit, drafts, confidence: as in `ExitSettings`.
        agreement: the share of the tokens that the exit names as the whole model does.
        acceptance: the share of the drafts that are kept.
        tokens_per_round: tokens that come out of one run of the layers behind the exit.
        predicted: tokens a second over those of the whole model alone, behind the prompt, from counts and the times of
            single runs.
        measured: the same of `generate` with its prompts; None where it was not timed.
    """

    exit: int
    drafts: int
    confidence: float
    agreement: float
    acceptance: float
    tokens_per_round: float
    predicted: float
    measured: float | None = None


@dataclass(frozen=True)
class Tuning:
    """What `tune_decoder` has found.

    Attributes:
        rows: of each exit the best by prediction, and those that were measured; the fastest first.
        best: the fastest that was measured; None where none is 5 % faster than the whole model alone.
        tokens_per_second: of the whole model alone, in `generate`.
    """

    rows: list[TunedRow]
    best: ExitSettings | None
    tokens_per_second: float


@dataclass(frozen=True)
class Continuation:
    """What each exit names for the tokens that the whole model has generated: `[N]` for each of the exits."""

    agree: dict[int, Tensor]
    confidence: dict[int, Tensor]


def frequent_tokens(texts: Iterable[Sequence[int] | Tensor], count: int) -> Tensor:
    """The `count` tokens that are seen most often in `texts`, lists of token numbers: the rows of a short draft head.

    Returns:
        int64 `[≤ count]`, in the order of their numbers. Negative numbers, as labels that are ignored, count nowhere.
    """
    counter: Counter[int] = Counter()
    for text in texts:
        counter.update(token for token in (text.tolist() if isinstance(text, Tensor) else text) if token >= 0)
    return torch.tensor(sorted(token for token, _ in counter.most_common(check_integer("count", count, 1))))


def keep_settings(model: Any, settings: ExitSettings | None) -> None:
    """Write `settings` to the model's `generation_config`, or remove what is there; `save_pretrained` keeps them."""
    config = model.generation_config
    setattr(config, EARLY_EXIT, None if settings is None else asdict(settings))
    config._from_model_config = False  # else transformers reads back none but its own entries


def tune_decoder(
    parts: ModelParts,
    prompts: Sequence[Any],
    exits: Sequence[int],
    *,
    new_tokens: int,
    draft_tokens: Tensor | None,
    progress: bool,
) -> Tuning:
    """See `LayerLosses.tune_decoder`."""
    if not exits:
        raise InputError("exits must hold at least one depth before the last, got none")
    model: Any = parts.model
    bar = tqdm(total=2 + len(exits) + _MEASURED, desc="tuning the decoder", disable=not progress, leave=False)
    with bar, torch.no_grad(), without_dropout(model):
        texts, seconds, named = continuations(parts, prompts, exits, new_tokens, draft_tokens)
        bar.update(2)
        count = sum(len(one.agree[exits[0]]) for one in named)
        prompts = [_prompt(prompt, model.device) for prompt in prompts]
        rows: list[TunedRow] = []
        for exit in exits:
            costs = _costs(parts, SplitModel(parts, exit, draft_tokens), texts[0])
            rows += _predicted(exit, named, costs)
            bar.update()
        rows.sort(key=lambda row: -row.predicted)
        measured = []
        for row in rows[:_MEASURED]:
            decoder = SpeculativeDecoder(parts, row.exit, row.drafts, row.confidence, draft_tokens)
            # In turns with the whole model alone: the machine may have become slower meanwhile.
            _, plain = _generated(model, prompts, new_tokens)
            _, own = _generated(model, prompts, new_tokens, custom_generate=decoder)
            measured.append(replace(row, measured=plain / own))
            bar.update()
    measured.sort(key=lambda row: -(row.measured or 0.0))
    first_of_exit = {row.exit: row for row in reversed(rows) if row.exit not in {row.exit for row in measured}}
    best = measured[0]
    tokens = None if draft_tokens is None else draft_tokens.tolist()
    faster = (best.measured or 0.0) > _LEAST_GAIN
    settings = ExitSettings(best.exit, best.drafts, best.confidence, tokens) if faster else None
    return Tuning([*measured, *reversed(first_of_exit.values())], settings, count / seconds)


@torch.no_grad()
def continuations(
    parts: ModelParts, prompts: Sequence[Any], exits: Sequence[int], new_tokens: int, draft_tokens: Tensor | None
) -> tuple[list[Tensor], float, list[Continuation]]:
    """Prompts with what the whole model adds greedily, the seconds that took, and what each exit names for that.

    Raises:
        InputError: there is no prompt, or one is no list of tokens.
    """
    check_integer("new_tokens", new_tokens, 2)
    model: Any = parts.model
    ids = [_prompt(prompt, model.device) for prompt in prompts]
    if not ids:
        raise InputError("prompts must hold at least one list of token numbers, got none")
    with without_dropout(model):
        texts, seconds = _generated(model, ids, new_tokens)
        pairs = zip(ids, texts, strict=True)
        return texts, seconds, [_named(parts, text, len(prompt), exits, draft_tokens) for prompt, text in pairs]


def _prompt(prompt: Any, device: torch.device) -> Tensor:
    try:
        ids = torch.as_tensor(prompt, device=device)
    except (TypeError, ValueError, RuntimeError):  # each for another kind of what is no number
        raise InputError(f"a prompt must be a list of token numbers, got {describe(prompt)}") from None
    if ids.dim() == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.dim() != 1 or ids.is_floating_point() or not len(ids):
        raise InputError(f"a prompt must be a list of token numbers, got {tuple(ids.shape)} {ids.dtype}")
    return ids.long()


def timed_continuations(model: Any, prompts: Sequence[Any], new_tokens: int, **options: Any) -> tuple[int, float]:
    """How many tokens `model.generate` adds greedily to prompts, one after the other, and the seconds that takes.

    Args:
        model: of transformers.
        prompts: token numbers, each `[T]`.
        new_tokens: the most that follow each prompt.
        options: of `generate`, such as `custom_generate` or `assistant_early_exit`.
    """
    ids = [_prompt(prompt, model.device) for prompt in prompts]
    with torch.no_grad(), without_dropout(model):
        texts, seconds = _generated(model, ids, new_tokens, **options)
    return sum(len(text) - len(prompt) for text, prompt in zip(texts, ids, strict=True)), seconds


def _generated(model: Any, prompts: Sequence[Tensor], new_tokens: int, **options: Any) -> tuple[list[Tensor], float]:
    """Prompts with what follows greedily, each `[T]`, and the seconds that took."""
    _wait(model)
    start = time.perf_counter()
    texts = [
        model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=new_tokens,
            do_sample=False,
            **options,
        )[0]
        for prompt in prompts
    ]
    _wait(model)
    return texts, time.perf_counter() - start


def _wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _named(
    parts: ModelParts, ids: Tensor, prompt: int, exits: Sequence[int], draft_tokens: Tensor | None
) -> Continuation:
    """Which of the tokens behind a prompt each exit names, given those before."""
    states: dict[int, Tensor] = {}

    def note(exit: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[exit] = state_of(args, kwargs)

    hooks = {exit: functools.partial(note, exit) for exit in exits}
    handles = [parts.layers[exit].register_forward_pre_hook(hook, with_kwargs=True) for exit, hook in hooks.items()]
    try:
        parts.model(input_ids=ids[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    agree, confidence = {}, {}
    for exit, state in states.items():
        logits = parts.capped(parts.head(parts.read(state[:, prompt - 1 : -1])))[0].float()
        if draft_tokens is not None:
            logits = logits[:, draft_tokens]
        best = logits.softmax(-1).max(-1)
        named = best.indices if draft_tokens is None else draft_tokens.to(best.indices.device)[best.indices]
        agree[exit], confidence[exit] = (named == ids[prompt:]).cpu(), best.values.cpu()
    return Continuation(agree, confidence)


@dataclass(frozen=True)
class _Costs:
    """Seconds of a token of the whole model, of one of the first part, with its head and without, and of n tokens of
    the second: `behind[0] + behind[1] n`."""

    whole: float
    draft: float
    last: float
    behind: tuple[float, float]


def _costs(parts: ModelParts, split: SplitModel, ids: Tensor) -> _Costs:
    model: Any = parts.model
    times: dict[str, list[float]] = {name: [] for name in ("whole", "draft", "last", "one", "many")}
    many = 8

    def timed(name: str, run: Callable[[], Any]) -> None:
        _wait(model)
        start = time.perf_counter()
        run()
        _wait(model)
        times[name].append(time.perf_counter() - start)

    with split.decoding():
        for _ in range(_REPETITIONS):
            cache = model(input_ids=ids[None, :-1], use_cache=True).past_key_values
            inputs = {"input_ids": ids[None, -1:], "past_key_values": cache, "use_cache": True}
            timed("whole", lambda i=inputs: model(**i))
            for count, name in ((1, "one"), (many, "many")):
                for number in range(count):
                    with_head = number % 2 == 0
                    timed("draft" if with_head else "last", lambda i=inputs, h=with_head: split.shallow(i, head=h))
                view = split.seen_from_behind(cache)
                kept = {"input_ids": ids[None, -1:].expand(1, count), "past_key_values": view, "use_cache": True}
                timed(name, lambda i=kept: split.deep(i))
    medians = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    slope = max(medians["many"] - medians["one"], 0.0) / (many - 1)
    return _Costs(medians["whole"], medians["draft"], medians["last"], (medians["one"] - slope, slope))


def _predicted(exit: int, found: Sequence[Continuation], costs: _Costs) -> list[TunedRow]:
    """A row for each number of drafts and each confidence: the rounds of a decoder, counted on what the exit names."""
    rows = []
    agreement = torch.cat([one.agree[exit] for one in found]).double().mean().item()
    for confidence in _CONFIDENCES:
        for drafts in _DRAFTS:
            tokens = rounds = drafted = accepted = 0
            seconds = 0.0
            for one in found:
                agree, sure = one.agree[exit].tolist(), (one.confidence[exit] >= confidence).tolist()
                at = 1  # the first token comes with the prompt
                while at < len(agree):
                    limit = min(drafts, len(agree) - at - 1)
                    made, matches = _round(agree, sure, at, limit)
                    seconds += made * costs.draft + (costs.last if made == limit else costs.draft)
                    seconds += costs.behind[0] + costs.behind[1] * (made + 1)
                    at += matches + 1
                    tokens, rounds = tokens + matches + 1, rounds + 1
                    drafted, accepted = drafted + made, accepted + matches
            share = accepted / drafted if drafted else 0.0
            row = TunedRow(exit, drafts, confidence, agreement, share, tokens / rounds, costs.whole * tokens / seconds)
            rows.append(row)
    return rows


def _round(agree: Sequence[bool], sure: Sequence[bool], at: int, limit: int) -> tuple[int, int]:
    """Drafts that are made and that are kept. Behind a wrong one the confidences are those of the right text."""
    made = matches = 0
    while made < limit and sure[at + made]:
        made += 1
        if matches == made - 1 and agree[at + made - 1]:
            matches += 1
    return made, matches
