from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cdt_fast
from cdt_fast import info
from cdt_fast.ops import common, products


def test_info_says_what_is_here(call: Callable[..., Any]) -> None:
    answer = call("info")
    assert answer.status == 0
    found = info.collect()
    assert found["cdt_fast"] == cdt_fast.__version__
    assert found["torch"] == torch.__version__
    assert found["CPU threads"] == torch.get_num_threads()
    assert all(isinstance(value, str | int) for value in found.values())
    lines = answer.out.splitlines()
    assert len(lines) == len(found)
    for line, (name, value) in zip(lines, found.items(), strict=True):
        assert line.startswith(name)
        assert line.endswith(str(value))


@pytest.mark.parametrize("narrow", [True, False])
def test_info_says_what_a_training_on_this_cpu_multiplies_in(narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cpu_has_bf16_products", lambda: narrow)
    expected = "bfloat16, with weights in float32 (lm: float32), by default" if narrow else "float32, by default"
    assert info.collect()["training multiplies in"] == expected


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (common.GpuSpec(90, 232_448, 132), "blocks for hopper cards, 227 KiB"),
        (common.GpuSpec(100, 232_448, 148), "blocks for hopper cards, 227 KiB"),
        (common.GpuSpec(120, 101_376, 132), "blocks for consumer cards, 99 KiB"),
    ],
)
def test_info_says_whose_blocks_a_gpu_takes(spec: common.GpuSpec, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "unavailable_reason", lambda: None)
    monkeypatch.setattr(common, "interpreting", lambda: False)
    monkeypatch.setattr(common, "unsupported_reason", lambda device, dtype: None)
    monkeypatch.setattr(common, "spec_of", lambda device: spec)
    assert common.explain().startswith(f"triton ({words} of shared memory")


@pytest.mark.parametrize(
    ("cuda", "words"),
    [(None, "this torch is built for CPUs; pip"), ("13.0", "driver on your system is too old (found version 11040)")],
)
def test_info_says_why_there_is_no_gpu(cuda: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert info.collect()["device"].startswith("cpu: ")
    assert words in info.collect()["device"]


@pytest.mark.parametrize("outcome", ["agrees with plain torch: 85.35", "is WRONG here: 87.35", "them, install gcc"])
def test_info_launches_a_kernel(outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from cdt_fast.kernels import layerwise_reconstruction_loss as kernels

    def forward(depths: list[torch.Tensor], target: torch.Tensor, *_: Any) -> torch.Tensor:
        if "gcc" in outcome:
            raise RuntimeError("Failed to find C compiler.")
        return (depths[0] - target).square().sum().view(1) + 128 * ("WRONG" in outcome)

    monkeypatch.setattr(kernels, "forward", forward)
    monkeypatch.setattr(common, "unavailable_reason", lambda: None)
    monkeypatch.setattr(common, "interpreting", lambda: True)
    assert outcome in info.collect()["a kernel"]
