"""Where and how precisely a training computes when nobody says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DynamoBackend

from cdt_fast.errors import InputError
from cdt_fast.ops import common
from cdt_fast.sequence.settings import TextSettings
from cdt_fast.tasks import TASKS
from cdt_fast.training.execution import resolve_execution
from cdt_fast.video import task as video_task
from cdt_fast.video.settings import VideoSettings
from cdt_fast.video.task import VideoWorkload
from tests.runs import load_data, task_of


def accelerator(device: str = "cuda", **others: Any) -> Any:
    state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO))
    common: dict[str, Any] = {"num_processes": 1, "mixed_precision": "no", "state": state}
    return SimpleNamespace(device=torch.device(device), **{**common, **others})


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a card")
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_a_gpu_trains_video_in_bfloat16_and_captured_by_default() -> None:
    execution = resolve_execution(VideoSettings(), accelerator(), TASKS["video"].load())
    assert (execution.precision, execution.autocast, execution.captured) == ("bf16", torch.bfloat16, True)


def test_a_gpu_trains_texts_in_bfloat16_and_launches_every_kernel() -> None:
    execution = resolve_execution(TextSettings(), accelerator(), TASKS["text"].load())
    assert (execution.precision, execution.captured) == ("bf16", False)


def test_a_processor_trains_in_float32() -> None:
    execution = resolve_execution(VideoSettings(), accelerator("cpu"), TASKS["video"].load())
    assert (execution.precision, execution.autocast, execution.captured) == ("fp32", None, False)


def test_several_processes_launch_every_kernel() -> None:
    assert not resolve_execution(VideoSettings(), accelerator(num_processes=2), TASKS["video"].load()).captured


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", True), ("ieee", False), ("bf16", False)])
def test_float32_products_are_tf32_unless_ieee_is_asked_for(precision: str, allowed: bool) -> None:
    settings = VideoSettings()
    settings.training.precision = precision  # type: ignore[assignment]
    resolve_execution(settings, accelerator(), TASKS["video"].load())
    assert torch.backends.cuda.matmul.allow_tf32 == allowed


def test_float16_without_a_scaler_is_refused() -> None:
    with pytest.raises(InputError, match="fp16"):
        resolve_execution(VideoSettings(), accelerator(mixed_precision="fp16"), TASKS["video"].load())


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, "each layer in one fused Triton kernel"),
        ({"sequence": "space", "size": 320}, "composed of ops, not in one kernel ("),
    ],
)
def test_the_first_line_says_which_kernels_run_and_why(
    tiny_config: Callable[..., VideoSettings], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], what: str
) -> None:
    monkeypatch.setattr(video_task, "explain", lambda: "triton (blocks for hopper cards)")
    settings = tiny_config(device="auto", **changes)
    execution = resolve_execution(settings, accelerator(), task_of(settings))
    line = execution.describe(VideoWorkload(settings, load_data(settings), torch.device("cpu")))
    assert line.startswith("computes on cuda, a card: products in bfloat16, weights and sums in float32; ")
    assert what in line
    assert "; a step is one CUDA graph\nthe first steps compile" in line


def test_without_kernels_the_first_line_says_why(
    tiny_config: Callable[..., VideoSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "unavailable_reason", lambda: "the moon is in the way")
    settings = tiny_config(device="auto")
    execution = resolve_execution(settings, accelerator(), task_of(settings))
    line = execution.describe(VideoWorkload(settings, load_data(settings), torch.device("cpu")))
    assert f"ops on {common.explain()}" in line
    assert "the moon is in the way" in line
