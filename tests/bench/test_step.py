"""The training step of the suites: a captured one is measured, and held to the formula as it is replayed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast.bench.case import Case, Unavailable
from cdt_fast.bench.ceilings import Ceilings
from cdt_fast.bench.clock import Rounds
from cdt_fast.bench.measure import measure
from cdt_fast.bench.suites import step
from cdt_fast.bench.suites.trained import DTYPES, TextWork, Trained, VideoWork
from cdt_fast.bench.suites.training_step import CONSTRAINED, LAST, LOGGED, TrainingStep, captured, fused, weighted
from tests.graph_fakes import TapeGraphs

CPU = torch.device("cpu")
WORKS: list[Trained] = [
    VideoWork("DUST", 4, window=5, patch=16, code=64, layers=2),
    VideoWork("VideoUT", 4, window=5, patch=16, code=64, layers=2, tied=False, readout="next"),
    TextWork(3, 7, 16, layers=2, vocabulary=30),
]


def replayed_cases(size: str) -> Iterator[Case]:
    return (case for case in step.cases(CPU, size) if "CUDA graph" in case.name)


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[TapeGraphs]:
    """Stands in for the CUDA graphs of a GPU, and says what was asked of them."""
    made: list[TapeGraphs] = []

    def graphs_of(device: torch.device) -> TapeGraphs:
        made.append(TapeGraphs())
        return made[-1]

    monkeypatch.setattr(step, "graphs_of", graphs_of)
    monkeypatch.setattr(step, "refuse_slow_bf16", lambda device, autocast: None)
    monkeypatch.setattr("cdt_fast.bench.suites.training_step.cpu_has_bf16_products", lambda: True)
    return made


def measured(case: Case) -> dict[str, Any]:
    return measure(case, CPU, Rounds(2, 2, 0.0), Ceilings(CPU, "toy"), lambda *_: "not asked for")["implementations"]


@pytest.mark.parametrize("family", ["DUST", "VideoUT"])
def test_replays_are_timed_against_launches(family: str, tapes: list[TapeGraphs]) -> None:
    case = next(case for case in replayed_cases("toy") if case.name.startswith(family))
    candidates = measured(case)
    assert {name: candidate["status"] for name, candidate in candidates.items()} == dict.fromkeys(
        candidates, "timed"
    ), candidates
    launched = [tape.asked for name, tape in zip(candidates, tapes, strict=True) if name.endswith("launched")]
    replayed = [tape.asked for name, tape in zip(candidates, tapes, strict=True) if name.endswith("CUDA graph")]
    assert launched == [[], []]
    for asked in replayed:
        # Warm-up, capture, the gate's call, one that tells how long it takes, and the rounds.
        assert asked[:5] == ["eager", "eager", "eager", "capture", "replay"]
        assert set(asked[5:]) == {"replay"}
        assert len(asked) >= 5 + 4


def test_a_step_that_decides_on_the_host_is_refused(tapes: list[TapeGraphs], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1, 100))

    def counting(model: Any, inputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        total, per_layer = fused(model, inputs, targets, weights)
        factor = 1 + (next(calls) > 3)  # from the fourth call on, which is the captured one
        return factor * total, factor * per_layer

    monkeypatch.setattr(step, "fused", counting)
    candidates = measured(next(replayed_cases("toy")))
    assert (candidates["cdt_fast, CUDA graph"]["status"], candidates["eager, CUDA graph"]["status"]) == (
        "wrong",
        "timed",
    )


@pytest.mark.parametrize("size", ["cpu", "gpu"])
def test_small_batches_are_refused_without_a_gpu_at_no_cost(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VideoWork, "build", lambda *_: pytest.fail("a model was built"))
    cases = list(replayed_cases(size))
    assert [case.shape["B"] for case in cases] == [100, 200, 400, 800] * 2
    for case in cases:
        for candidate in case.implementations:
            with pytest.raises(Unavailable, match=r"^a CUDA graph needs an NVIDIA GPU$"):
                candidate.prepare()


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.title)
def test_a_captured_step_trains_as_one_that_is_launched(work: Trained) -> None:
    # The same fused update: captured steps keep the rate on the device, and torch's other update rounds differently.
    graphs = TapeGraphs()
    replayed = captured(work, fused, CPU, False, graphs)
    launched = TrainingStep(work, fused, CPU, graphs=_Eager())
    for _ in range(4):
        for one, other in zip(replayed(), launched(), strict=True):
            assert torch.equal(one, other)
    assert graphs.asked.count("replay") == 5


class _Eager(TapeGraphs):
    def capture(self, work: Any) -> Any:
        return work


@pytest.mark.parametrize("reads", [CONSTRAINED, LOGGED, LAST])
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.title)
def test_a_restarted_step_is_the_first_again(work: Trained, reads: str) -> None:
    losses = work.last_loss if reads == LAST else weighted(work.formula)
    one = TrainingStep(work, losses, CPU, reads)
    first = [[tensor.clone() for tensor in one()] for _ in range(3)]
    assert not torch.equal(first[0][0], first[2][0])  # it has learned something
    one.restart()
    for expected in first:
        for found, known in zip(one(), expected, strict=True):
            assert torch.equal(found, known)


def test_every_model_and_dtype_has_its_cases() -> None:
    names = [case.name for case in step.cases(CPU, "cpu")]
    assert len(set(names)) == len(names)
    for model in ("DUST tied", "DUST untied, next readout", "DUST untied, own readout", "VideoUT tied", "TextUT"):
        for dtype in DTYPES:
            for what in ("constrained", "constrained against unconstrained"):
                assert f"{model}, {what}, {dtype}" in names
