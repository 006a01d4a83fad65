"""No test inherits the mixed precision of another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def own_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset what accelerate keeps for the whole process, and transformers in the environment."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
