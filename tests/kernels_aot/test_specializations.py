"""How often a kernel is compiled in a training whose batches differ in size, by the key of Triton's own launcher."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from cdt_fast import ops
from cdt_fast.bench.ledger import recording
from cdt_fast.bench.ledger.recording import META, Entry, record
from cdt_fast.bench.ledger.works import Work, inference, training
from cdt_fast.bench.suites.trained import TextWork, VideoWork
from cdt_fast.kernels.aot.compile import Configuration, measure
from cdt_fast.kernels.cards import CARDS, GpuSpec
from cdt_fast.kernels.launch import Launch

MOST = 4
# Whole batches, one for the validation, a short last one, and one of a single sequence.
SEQUENCES = (400, 256, 37, 1)


def launched(monkeypatch: pytest.MonkeyPatch, works: list[Work], card: GpuSpec) -> set[Configuration]:
    """What Triton would compile for all these works."""
    found: set[Configuration] = set()
    of = Entry.of

    def noted(launch: Launch) -> Entry:
        found.add(Configuration.of(launch, card))
        return of(launch)

    monkeypatch.setattr(recording.Entry, "of", noted)
    for work in works:
        record(lambda work=work: work.prepare(False), card)
    return found


def compilations(monkeypatch: pytest.MonkeyPatch, works: list[Work]) -> Counter[str]:
    """Of each kernel, in all these works."""
    return Counter(configuration.kernel for configuration in launched(monkeypatch, works, CARDS["H200"]))


@pytest.mark.parametrize("family", ["DUST", "VideoUT"])
def test_video(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    sizes = [VideoWork(family, sequences, layers=3) for sequences in SEQUENCES]
    works = [make(size) for size in sizes for make in (training, inference)]
    counts = compilations(monkeypatch, works)
    assert {"unrolled_forward_kernel", "unrolled_backward_kernel"} <= counts.keys()
    assert max(counts.values()) <= MOST, counts


def test_text(monkeypatch: pytest.MonkeyPatch) -> None:
    # Texts are padded to the longest of their batch.
    sizes = [TextWork(texts, tokens, 768) for texts, tokens in ((32, 250), (32, 256), (16, 240), (7, 131))]
    counts = compilations(monkeypatch, [make(size) for size in sizes for make in (training, inference)])
    assert "residual_linear_forward_kernel" in counts
    assert max(counts.values()) <= MOST, counts


@pytest.mark.parametrize("options", [{}, {"inner_kl": 0.5}, {"inner_kl": 0.5, "detach_last": False}], ids=str)
def test_losses(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    def losses(tokens: int) -> Work:
        def run() -> object:
            hidden = [torch.empty(tokens, 64, dtype=torch.bfloat16, device=META, requires_grad=True) for _ in range(3)]
            head = torch.empty(50257, 64, dtype=torch.bfloat16, device=META, requires_grad=True)
            targets, weights = torch.empty(tokens, dtype=torch.int64, device=META), torch.empty(3, device=META)
            total, *_ = ops.layerwise_cross_entropy(hidden, head, targets, depth_weights=weights, **options)
            return torch.autograd.grad(total, [*hidden, head])

        return Work("losses", tokens, lambda captured: run, 0.0, 0.0)

    counts = compilations(monkeypatch, [losses(tokens) for tokens in (8192, 7001, 999, 1)])
    assert max(counts.values()) <= MOST, counts


@pytest.mark.slow
@pytest.mark.parametrize("card", ["H200", "RTX 3090", "B200", "B300"])
def test_what_a_default_training_launches_compiles_without_a_spill(monkeypatch: pytest.MonkeyPatch, card: str) -> None:
    works = [training(VideoWork("DUST", 400, layers=3)), training(TextWork(32, 250, 768))]
    for configuration in launched(monkeypatch, works, CARDS[card]):
        found = measure(configuration)
        assert not found.faults(configuration.card, spill_allowed=False), configuration.kernel
