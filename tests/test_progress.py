from __future__ import annotations

import io
import sys

import pytest

from cdt_fast import progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(monkeypatch: pytest.MonkeyPatch, seconds: float, shown: bool = True) -> list[str]:
    """What going through ten things says where stderr is a file."""
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", seconds)
    things = range(10)
    assert list(progress.progress_bar(things, desc="measure", unit="sample", shown=shown)) == list(things)
    written = file.getvalue()
    assert "\r" not in written
    return written.splitlines()


def test_in_a_file_progress_is_whole_lines_and_says_how_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(monkeypatch, 0.0)
    assert len(lines) >= 2
    for line in lines:
        assert line.startswith("measure: ")
        assert " of 10 samples, " in line
        assert line.endswith(" to go")


def test_what_is_quick_or_not_to_be_shown_says_nothing_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_of(monkeypatch, 30.0) == []
    assert lines_of(monkeypatch, 0.0, shown=False) == []


def test_on_a_terminal_it_is_a_bar_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress.progress_bar(range(10), desc="measure", unit="sample")) == list(range(10))
    assert "\r" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
