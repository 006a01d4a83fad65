"""Where and how precisely a training computes when nobody says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cdt_fast.checks import InputError
from cdt_fast.tasks import TASKS, task_of
from cdt_fast.training.execution import Execution, resolve_execution
from cdt_fast.video import task as video_task
from cdt_fast.video.settings import VideoSettings
from cdt_fast.video.task import VideoWorkload
from tests.runs import Config, load_data


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a card")
    monkeypatch.setattr("cdt_fast.ops.common.is_hopper", lambda _: False)
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def resolved(task: str = "video", *, settings: Any = None, device: str = "auto") -> Execution:
    settings = settings or TASKS[task].settings.chosen({"training": {"device": device}})
    return resolve_execution(settings, task_of(settings))


@pytest.mark.parametrize(
    ("given", "precision", "captured"),
    [
        ({}, "bf16", True),
        ({"device": "cpu"}, "bf16", False),
        ({"device": "cpu", "task": "text"}, "bf16", False),
        ({"device": "cpu", "task": "lm"}, "fp32", False),
        ({"task": "text"}, "bf16", False),  # whose shapes differ
    ],
)
def test_the_default_is_bfloat16_where_it_is_fast_and_captures_what_can_be(
    given: dict[str, Any], precision: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdt_fast.training.execution.cpu_has_bf16_products", lambda: True)
    execution = resolved(**given)
    assert (execution.precision, execution.captured) == (precision, captured)
    assert execution.autocast == (torch.bfloat16 if precision == "bf16" else None)


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", True), ("ieee", False), ("bf16", False)])
def test_float32_products_are_tf32_unless_ieee_is_asked_for(precision: str, allowed: bool) -> None:
    resolved(settings=VideoSettings.chosen({"training": {"precision": precision}}))
    assert torch.backends.cuda.matmul.allow_tf32 == allowed


def test_a_gpu_that_is_not_there_is_refused(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolved().device.type == "cpu"
    with pytest.raises(InputError, match="device is cuda, but torch finds no CUDA GPU"):
        resolved(settings=tiny_config(device="cuda"))


@pytest.mark.parametrize(
    ("changes", "backend", "what"),
    [
        ({}, "triton (blocks for rtx cards)", "each layer in one fused Triton kernel"),
        ({"patch": 32}, "triton (blocks for rtx cards)", "composed of ops, not in one kernel ("),
        ({}, "torch (an old card)", "ops on torch (an old card)"),
    ],
)
def test_the_first_line_says_which_kernels_run_and_why(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch, changes: Any, backend: str, what: str
) -> None:
    monkeypatch.setattr(video_task, "explain", lambda: backend)
    settings = tiny_config(device="auto", precision="auto", **changes)
    workload = VideoWorkload(settings, load_data(settings), torch.device("cpu"))
    line = resolved(settings=settings).describe(workload)
    assert line.startswith("computes on cuda, a card: products in bfloat16, weights and sums in float32; ")
    assert what in line
    assert "; a step is one CUDA graph\nthe first steps compile" in line
