"""Decoding with an exit: early layers draft tokens, all layers verify them, in the place of transformers' own loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cdt_fast.checks import check_integer, check_number
from cdt_fast.errors import InputError
from cdt_fast.models.layer_losses.decoding.split import SplitModel, check_cache, check_split, crop, no_decoding
from cdt_fast.models.layer_losses.parts import LANGUAGE_MODEL, ModelParts

_ONE_PER_TOKEN = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


@dataclass
class DecodingCounts:
    """What a decoder has done since it was made.

    Attributes:
        tokens: generated, a row of the batch.
        rounds: runs of the layers behind the exit; one token or more comes out of each.
        drafted: tokens that the exit proposed.
        accepted: those of them that were kept.
    """

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """The share of the drafts that were kept; NaN without any."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else float("nan")


@dataclass
class _Sequence:
    """One call of `generate`."""

    model: Any
    ids: Tensor  # [B, tokens], those that are decided
    kwargs: dict[str, Any]  # of the model's forward, for as many tokens as `ids` has
    cache: Any
    processors: Any
    criteria: Any
    config: Any
    streamer: Any
    unfinished: Tensor  # [B]
    scores: list[Tensor]
    logits: list[Tensor]

    @property
    def finished(self) -> bool:
        return not bool(self.unfinished.any())

    def inputs(self, ids: Tensor, tokens: int, cache: Any = None) -> dict[str, Any]:
        """The arguments of a forward of the last `tokens` of `ids`, which may go on behind those that are decided."""
        kwargs = {**self.advanced(ids.shape[1] - self.ids.shape[1]), "past_key_values": cache or self.cache}
        return self.model.prepare_inputs_for_generation(ids, next_sequence_length=tokens, **kwargs)

    def advanced(self, tokens: int) -> dict[str, Any]:
        """The arguments for `tokens` more tokens than are decided, or for one less."""
        if tokens < 0:
            return {k: v[..., :tokens] if k in _ONE_PER_TOKEN and v is not None else v for k, v in self.kwargs.items()}
        if not tokens:
            return self.kwargs
        return self.model._update_model_kwargs_for_generation({}, dict(self.kwargs), num_new_tokens=tokens)

    def scored(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The scores `[B, V]`, float32, that the next token after `ids` is chosen by."""
        return self.processors(ids, logits.to(torch.float32, copy=True))

    def emit(self, tokens: Tensor, scores: list[Tensor], logits: list[Tensor]) -> int:
        """Decide `tokens` `[B, n]` one by one until every row is finished; the number that were."""
        for number in range(tokens.shape[1]):
            new = tokens[:, number]
            padding = self.config._pad_token_tensor
            if padding is not None:
                new = torch.where(self.unfinished, new, padding.to(new.device))
            self.ids = torch.cat([self.ids, new[:, None]], 1)
            if self.streamer is not None:
                self.streamer.put(new.cpu())
            if self.config.return_dict_in_generate and self.config.output_scores:
                self.scores.append(scores[number])
            if self.config.return_dict_in_generate and self.config.output_logits:
                self.logits.append(logits[number].to(torch.float32, copy=True))
            self.unfinished &= ~self.criteria(self.ids, scores[number])
            if self.finished:
                return number + 1
        return tokens.shape[1]


class ExitDecoder(ABC):
    """A decoding method for `model.generate(..., custom_generate=…)`.

    Attributes:
        exit: the depth whose state the head reads early.
        counts: what it has done.
        streamer: of transformers, or None; `generate` hands none to a decoding method that is given to it.
    """

    def __init__(self, parts: ModelParts, exit: int, draft_tokens: Tensor | None) -> None:
        self.exit = check_exit(parts, exit)
        self.counts = DecodingCounts()
        self.streamer: Any = None
        self._parts = parts
        self._split = SplitModel(parts, self.exit, _checked_rows(parts, draft_tokens))
        check_split(parts, self.exit)

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Called by `generate`, with what it has prepared."""
        self._check(model, generation_config)
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        with self._split.decoding():
            output = model._prefill(input_ids, generation_config, model_kwargs)
            cache = output.get("past_key_values")
            check_cache(model, cache)
            cache.activate_past_recording()
            sequence = _Sequence(
                model=model,
                ids=input_ids,
                kwargs=model_kwargs,
                cache=cache,
                processors=logits_processor,
                criteria=stopping_criteria,
                config=generation_config,
                streamer=self.streamer,
                unfinished=torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device),
                scores=[],
                logits=[],
            )
            logits = output.logits[:, -1]
            scores = sequence.scored(input_ids, logits)
            self._emit(sequence, chosen(scores, generation_config.do_sample)[:, None], [scores], [logits])
            while not sequence.finished:
                self._round(sequence)
        if self.streamer is not None:
            self.streamer.end()
        return _result(sequence)

    def _verified(self, sequence: _Sequence, ids: Tensor) -> Tensor:
        """Run the second part on all tokens whose states are kept, the last ones of `ids`: their logits `[B, n, V]`."""
        kept = self._split.kept
        inputs = sequence.inputs(ids, kept, self._split.seen_from_behind(sequence.cache))
        return self._split.deep(inputs).logits[:, -kept:]

    @abstractmethod
    def _round(self, sequence: _Sequence) -> None:
        """Decide at least one more token."""

    def _emit(self, sequence: _Sequence, tokens: Tensor, scores: list[Tensor], logits: list[Tensor]) -> int:
        count = sequence.emit(tokens, scores, logits)
        sequence.kwargs = sequence.advanced(count)
        self.counts.tokens += count
        return count

    def _exit_scores(self, sequence: _Sequence, ids: Tensor, *, rows_only: bool) -> tuple[Tensor, Tensor]:
        """Run the first part on the last token of `ids`: the scores of the next one, and its logits, by the exit.

        With `rows_only` they are of `draft_tokens` alone, in their order; else of the vocabulary.
        """
        logits = self._split.shallow(sequence.inputs(ids, 1))
        assert logits is not None
        logits, rows = logits[:, -1], self._split.rows
        if rows is not None and not rows_only:
            whole = logits.new_full((len(logits), self._parts.classes), -torch.inf)
            logits = whole.index_copy_(1, rows, logits)
        return logits if rows_only else sequence.scored(ids, logits), logits

    def _check(self, model: Any, config: Any) -> None:
        if model is not self._parts.model:
            raise InputError(
                f"this decoder was made for another model than the {type(model).__name__} that generates: make one "
                "with its own handle"
            )
        if config.num_beams != 1:
            raise InputError(f"num_beams must be 1 to decode with an exit, got {config.num_beams}, several sequences")
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name, None):
                raise InputError(f"{name} must be False to decode with an exit: no forward runs all of the layers")


class SpeculativeDecoder(ExitDecoder):
    """The tokens that the whole model would generate, drafted by its own first layers.

    A round drafts tokens with the first `exit` layers, one by one, and runs the other layers on all of them at once.
    Greedy: a draft is kept while it is the token of the whole model. Sampled: a draft x of probability q(x) is kept
    with probability min(1, p(x) / q(x)), p that of the whole model, and else drawn anew from max(p − q, 0), normalized:
    the distribution is that of the whole model. One token more than is kept comes out of each round.

    In a batch all rows advance by the number of tokens of the row that keeps least.

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", algorithm 1.
    """

    def __init__(
        self,
        parts: ModelParts,
        exit: int,
        drafts: int,
        confidence: float = 0.0,
        draft_tokens: Tensor | None = None,
    ) -> None:
        super().__init__(parts, exit, draft_tokens)
        self.drafts = check_integer("drafts", drafts, 1)
        self.confidence = check_number("confidence", confidence, "a number in [0, 1)", lambda number: 0 <= number < 1)

    def _round(self, sequence: _Sequence) -> None:
        sample, decided = sequence.config.do_sample, sequence.ids.shape[1]
        ids, qs = self._drafted(sequence)
        drafts, logits = ids[:, decided:], self._verified(sequence, ids).unbind(1)
        scores = [sequence.scored(ids[:, : decided + number], row) for number, row in enumerate(logits)]
        if sample:
            tokens, matches = _accepted(drafts, qs, scores)
        else:
            tokens = torch.stack([chosen(score, False) for score in scores], 1)
            matches = (tokens[:, :-1] == drafts).long().cumprod(1).sum(1)
        accepted = int(matches[sequence.unfinished].min())
        count = self._emit(sequence, tokens[:, : accepted + 1], scores, list(logits))
        crop(sequence.cache, len(logits) - count)
        self.counts.rounds += 1
        self.counts.drafted += drafts.shape[1]
        self.counts.accepted += accepted

    def _drafted(self, sequence: _Sequence) -> tuple[Tensor, list[Tensor]]:
        """The decided tokens with drafts behind them, and of sampled drafts their distributions `[B, V]`.

        The first part has then run on all of them.
        """
        sample, ids = sequence.config.do_sample, sequence.ids
        # Without processors greedy drafts need the scores of the tokens alone that the exit can name.
        rows_only = not sample and not len(sequence.processors)
        qs: list[Tensor] = []
        left = sequence.config.max_length - ids.shape[1]  # a preallocated cache holds no more
        for _ in range(min(self.drafts, left - 1)):
            scores, _ = self._exit_scores(sequence, ids, rows_only=rows_only)
            q = scores.softmax(-1) if sample or self.confidence else scores
            if self.confidence and not bool((q.max(-1).values >= self.confidence)[sequence.unfinished].any()):
                return ids, qs
            token = torch.multinomial(q, 1) if sample else q.argmax(-1, keepdim=True)
            if rows_only and self._split.rows is not None:
                token = self._split.rows[token]
            ids = torch.cat([ids, token], 1)
            if sample:
                qs.append(q)
        self._split.shallow(sequence.inputs(ids, 1), head=False)
        return ids, qs


class ConfidentExitDecoder(ExitDecoder):
    """Not the tokens that the whole model would generate: one that the exit is sure of is taken as it is.

    Where the largest probability at the exit is below `threshold` the other layers run, on that token and on all that
    were taken from the exit since: what later tokens attend to is exact for the tokens that were chosen. In a batch the
    exit counts where every row is sure.

    Source: Schuster et al., "Confident Adaptive Language Modeling"; the layers behind the exit are run in place of
    copied states.
    """

    def __init__(
        self, parts: ModelParts, exit: int, threshold: float, draft_tokens: Tensor | None = None, longest: int = 32
    ) -> None:
        super().__init__(parts, exit, draft_tokens)
        self.threshold = check_number("threshold", threshold, "a number in [0, 1]", lambda number: 0 <= number <= 1)
        self.longest = check_integer("longest", longest, 1)

    def _round(self, sequence: _Sequence) -> None:
        sample = sequence.config.do_sample
        while not sequence.finished:
            scores, logits = self._exit_scores(sequence, sequence.ids, rows_only=False)
            self.counts.drafted += 1
            confidence = logits.to(torch.float32).softmax(-1).max(-1).values[sequence.unfinished].min()
            if float(confidence) < self.threshold or self._split.kept >= self.longest:
                break
            self.counts.accepted += 1
            self._emit(sequence, chosen(scores, sample)[:, None], [scores], [logits])
        # Also of an ended sequence, whose last token has not run: a cache that is handed back is whole.
        logits = self._verified(sequence, sequence.ids[:, :-1] if sequence.finished else sequence.ids)[:, -1]
        self.counts.rounds += 1
        crop(sequence.cache, 0)
        if not sequence.finished:
            scores = sequence.scored(sequence.ids, logits)
            self._emit(sequence, chosen(scores, sample)[:, None], [scores], [logits])


def chosen(scores: Tensor, sample: bool) -> Tensor:
    """A token a row `[B]`, the best or a drawn one."""
    return torch.multinomial(scores.softmax(-1), 1)[:, 0] if sample else scores.argmax(-1)


def check_exit(parts: ModelParts, exit: Any) -> int:
    """`exit` as a depth before the last of a language model, where transformers can take tokens back from a cache."""
    if parts.kind != LANGUAGE_MODEL:
        raise no_decoding(parts.model, "it is a classifier: decoding is for causal language models")
    import transformers
    from transformers.cache_utils import Cache

    if not hasattr(Cache, "activate_past_recording") or not hasattr(parts.model, "_prefill"):
        raise InputError(f"decoding with an exit needs transformers >= 5.20, this is {transformers.__version__}")
    depth, layers = check_integer("exit", exit, 1), len(parts.layers)
    if depth >= layers:
        raise InputError(f"exit must be between 1 and {layers - 1}, a depth before the last of {layers}, got {exit}")
    return depth


def _checked_rows(parts: ModelParts, draft_tokens: Tensor | None) -> Tensor | None:
    if draft_tokens is None:
        return None
    tokens = torch.as_tensor(draft_tokens, device=next(parts.head.parameters()).device)
    if tokens.dim() != 1 or tokens.is_floating_point() or not len(tokens):
        raise InputError(f"draft_tokens must be a list of token numbers, got {tuple(tokens.shape)} {tokens.dtype}")
    tokens: Tensor = torch.unique(tokens.long())
    if int(tokens[0]) < 0 or int(tokens[-1]) >= parts.classes:
        raise InputError(
            f"draft_tokens must be tokens of 0..{parts.classes - 1}, got {int(tokens[0])} to {int(tokens[-1])}: are "
            "they of another tokenizer?"
        )
    return tokens


def _accepted(drafts: Tensor, qs: list[Tensor], scores: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens `[B, n]`, and how many of the n − 1 drafts `[B]` are kept, each by rejection against the whole model.

    The token behind the last draft that is kept is drawn from what the draft's distribution lacks, or, where all are
    kept, from the whole model's.
    """
    ps = torch.stack([score.softmax(-1) for score in scores], 1)
    last = ps[:, -1]
    if not qs:
        return torch.multinomial(last, 1), drafts.new_zeros(len(drafts))
    q, p = torch.stack(qs, 1), ps[:, :-1]
    of_q, of_p = (x.gather(2, drafts[..., None])[..., 0] for x in (q, p))
    keep = torch.rand_like(of_p) * of_q < of_p
    matches = keep.long().cumprod(1).sum(1)
    lacking = torch.cat([(p - q).clamp(min=0), last[:, None]], 1)
    behind = lacking[torch.arange(len(drafts), device=drafts.device), matches]
    # A row of zeros: p and q agree but for rounding, so that nothing can be rejected in exact arithmetic.
    at = torch.arange(len(drafts), device=drafts.device)
    behind = torch.where(behind.sum(-1, keepdim=True) > 0, behind, ps[at, matches])
    tokens = torch.cat([drafts, drafts[:, :1]], 1)
    return tokens.scatter(1, matches[:, None], torch.multinomial(behind, 1)), matches


def _result(sequence: _Sequence) -> Any:
    """What `generate` returns."""
    config = sequence.config
    if not config.return_dict_in_generate:
        return sequence.ids
    from transformers.generation import GenerateDecoderOnlyOutput

    fields: dict[str, Any] = {"sequences": sequence.ids, "past_key_values": sequence.cache}
    for name in ("scores", "logits"):
        fields[name] = tuple(getattr(sequence, name)) if getattr(config, f"output_{name}") else None
    return GenerateDecoderOnlyOutput(**fields)
