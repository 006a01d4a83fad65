from __future__ import annotations

import io
import sys

import pytest

from cdt_fast.progress import progress_bar


@pytest.mark.parametrize(("terminal", "shown"), [(True, True), (True, False), (False, True)])
def test_a_bar_is_drawn_on_a_terminal_and_nothing_quick_in_a_file(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, shown: bool
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    assert list(progress_bar(range(10), desc="measure", unit="sample", shown=shown)) == list(range(10))
    assert ("100%" in stderr.getvalue()) == (terminal and shown)
