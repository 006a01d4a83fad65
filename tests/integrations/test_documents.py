"""The examples of docs/your_model.md run as they stand, and add at most ten lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import in_ranks

DOCUMENT = Path(__file__).parents[2] / "docs" / "your_model.md"
BLOCKS = dict(re.findall(r"```python (\w+)\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL))
ALONE = ("trainer", "trl", "lightning", "loop")
DISTRIBUTED = ("accelerate", "fsdp2")


def run(name: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "document"}
    exec(compile(BLOCKS[name], f"<{DOCUMENT.name}, {name}>", "exec"), names)
    return names


def test_every_example_is_known_and_adds_at_most_ten_lines() -> None:
    assert BLOCKS.keys() == {*ALONE, *DISTRIBUTED}
    for name, code in BLOCKS.items():
        added = [line for line in code.splitlines() if line.endswith("# +")]
        assert 3 <= len(added) <= 10, name


@pytest.mark.parametrize("name", ALONE)
def test_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in ("trl", "lightning"):
        pytest.importorskip(name, reason=f"the package {name!r} is not installed")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = run(name)
    holder = {"loop": None, "lightning": "descent"}.get(name, "trainer")
    constraints = names["constraints"] if holder is None else names[holder].constraints
    # With an anchor depth 0 has no constraint, and layer 1 has one once the anchor is known, after twenty steps.
    assert constraints.multipliers[0] == 0
    assert (constraints.multipliers[1] > 0) == (constraints.descent.measured.count == 20)
    assert constraints.multipliers[2:].min() > 0


def work(rank: int, folder: str) -> dict[str, torch.Tensor]:
    return {name: run(name)["constraints"].multipliers for name in DISTRIBUTED}


@pytest.mark.slow
def test_distributed_examples_are_those_of_one_process(tmp_path: Path) -> None:
    if not dist.is_available():
        pytest.skip("this torch has no torch.distributed")
    alone = {"accelerate": run("accelerate")["constraints"].multipliers}
    try:
        alone["fsdp2"] = run("fsdp2")["constraints"].multipliers  # as by plain python: it makes a group of its own
    finally:
        dist.destroy_process_group()
    for found in in_ranks(work, tmp_path):
        for name in DISTRIBUTED:
            assert alone[name][0] == 0  # with an anchor depth 0 has no constraint
            assert alone[name][1:].min() > 0
            torch.testing.assert_close(found[name], alone[name], rtol=0, atol=1e-6)
