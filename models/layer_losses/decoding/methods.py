"""What the handle of `attach_layer_losses` offers for decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from cdt_fast.errors import InputError
from cdt_fast.models.early_exit import Calibration, least_threshold
from cdt_fast.models.layer_losses.decoding.decoder import ConfidentExitDecoder, SpeculativeDecoder, check_exit
from cdt_fast.models.layer_losses.decoding.split import check_split
from cdt_fast.models.layer_losses.decoding.tuning import EARLY_EXIT, Tuning, continuations, keep_settings, tune_decoder
from cdt_fast.models.layer_losses.parts import ModelParts


class DecodingMethods:
    """Decoders of the model that a handle is attached to."""

    taps: tuple[int, ...]
    _parts: ModelParts

    def decoder(
        self,
        exit: int | Literal["auto"] = "auto",
        drafts: int = 4,
        *,
        confidence: float = 0.0,
        draft_tokens: Tensor | None = None,
        streamer: Any = None,
    ) -> SpeculativeDecoder:
        """A method of decoding: `model.generate(..., custom_generate=handle.decoder())`.

        The first `exit` layers draft tokens and all layers verify them: what comes out is what the model alone would
        generate, for greedy decoding token by token and for sampling in distribution. Any batch, processors, stopping
        criteria, streamer, and a dynamic or a static cache; no beams.

        Args:
            exit: the depth that drafts, of 1..L−1, tapped or not. "auto": this and all that follows as `tune_decoder`
                found them, from `model.generation_config`.
            drafts: the most tokens that a round drafts.
            confidence: drafting ends before a token of less probability at the exit, of 0..1. Above 0 the host waits
                for each draft.
            draft_tokens: the only tokens that the exit can name, `frequent_tokens` for one; the fewer, the faster is
                its head. None: all.
            streamer: is given every token as it is decided; `generate(streamer=…)` does not reach a decoder.

        Raises:
            InputError: a classifier, or a model whose layers cannot be run in two parts; an exit that is no depth
                before the last; with "auto", a model that was not tuned. From `generate`: beams, a cache from which
                tokens cannot be removed, or outputs that no forward has whole.
        """
        if exit == "auto":
            settings = getattr(getattr(self._parts.model, "generation_config", None), EARLY_EXIT, None)
            if settings is None:
                raise InputError(
                    "exit='auto' needs a tuned model: call tune_decoder(prompts) first, or name the exit, a depth"
                )
            return self.decoder(**settings, streamer=streamer)
        decoder = SpeculativeDecoder(self._parts, exit, drafts, confidence, draft_tokens)
        decoder.streamer = streamer
        return decoder

    def tune_decoder(
        self,
        prompts: Sequence[Any],
        *,
        exits: Sequence[int] | None = None,
        new_tokens: int = 64,
        draft_tokens: Tensor | None = None,
        progress: bool = True,
    ) -> Tuning:
        """Choose exit, drafts and confidence on prompts, and write them to `model.generation_config.early_exit`.

        The model continues each prompt greedily. What every exit names for these tokens says how many drafts of any
        setting would be kept; with the times of single runs that predicts each setting's speed, and the best three are
        measured in `generate`, in turns with the model alone. `save_pretrained` keeps the choice.

        Args:
            prompts: token numbers, each `[T]`; use texts that the model was not trained on.
            exits: the depths to try. None: those of `taps`, before the last and behind the first.
            new_tokens: how many follow each prompt.
            draft_tokens: as in `decoder`.
            progress: show a bar on stderr.

        Returns:
            Every setting that was measured and the best of each exit. `best` is None, and the entry is removed, where
            nothing is 5 % faster than the model alone.
        """
        layers = len(self._parts.layers)
        depths = [tap for tap in self.taps if 0 < tap < layers] if exits is None else list(exits)
        depths = [check_exit(self._parts, depth) for depth in depths]
        for depth in depths:
            check_split(self._parts, depth)
        tuning = tune_decoder(
            self._parts, prompts, depths, new_tokens=new_tokens, draft_tokens=draft_tokens, progress=progress
        )
        keep_settings(self._parts.model, tuning.best)
        return tuning

    def confident_decoder(
        self, exit: int, threshold: float, *, draft_tokens: Tensor | None = None, streamer: Any = None
    ) -> ConfidentExitDecoder:
        """A method of decoding that is not lossless: a token that the exit is sure of is taken from it.

        What comes out is not what the model alone would generate; `calibrate_exit` chooses the threshold for a stated
        agreement. Used as `decoder` is.

        Args:
            exit: a depth of 1..L−1, tapped or not.
            threshold: the least of the exit's largest probability, of 0..1, at which its token is taken. 1: never.
            draft_tokens, streamer: as in `decoder`.
        """
        decoder = ConfidentExitDecoder(self._parts, exit, threshold, draft_tokens)
        decoder.streamer = streamer
        return decoder

    def calibrate_exit(
        self,
        prompts: Sequence[Any],
        exit: int,
        agreement: float = 0.98,
        *,
        new_tokens: int = 64,
        draft_tokens: Tensor | None = None,
    ) -> Calibration:
        """The threshold of `confident_decoder` at which so many tokens stay those of the whole model.

        It is the least one whose agreement, on what the model adds greedily to these prompts, is as large with 95 %
        confidence. The exit reads the whole model's text there; in decoding it reads its own, where one other token may
        lead to others.

        Args:
            prompts: token numbers, each `[T]`; use texts that the model was not trained on.
            exit: a depth of 1..L−1.
            agreement: the share of the tokens, of (0, 1).
            new_tokens: how many follow each prompt.
            draft_tokens: as in `decoder`.
        """
        exit = check_exit(self._parts, exit)
        _, _, named = continuations(self._parts, prompts, [exit], new_tokens, draft_tokens)
        agree = torch.cat([one.agree[exit] for one in named])
        confidence = torch.cat([one.confidence[exit] for one in named]).double()
        if not len(agree):
            raise InputError("calibrating an exit needs prompts that the model continues, got none that it does")
        return least_threshold(confidence.unsqueeze(1), agree.unsqueeze(1), agreement)
