"""What `make audit` says of pip-audit's answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import audit

CLEAN = {"name": "numpy", "version": "2.4.6", "vulns": []}
VULNERABLE = {"name": "pillow", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": []}]}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.13.0)"}


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        ([CLEAN], 0, "audit: 1 packages by pypi, 0 with known vulnerabilities\n"),
        ([CLEAN, VULNERABLE], 1, "audit: pillow 1.0: PYSEC-1\naudit: 2 packages by pypi, 1 with known"),
        ([CLEAN, UNKNOWN], 0, "audit: not audited: Dependency not found on PyPI and could not be audited: torch"),
        ([UNKNOWN, UNKNOWN], 0, "audit: SKIPPED, nothing was audited: pypi: it knows none of 2 packages (Dependency"),
        ([], 0, "audit: SKIPPED, nothing was audited: pypi: it knows none of 0 packages; osv: it knows none of 0"),
        ("ERROR:no route", 0, "audit: SKIPPED, nothing was audited: pypi: ERROR:no route; osv: ERROR:no route"),
        (None, 0, "audit: SKIPPED, nothing was audited: pypi: [Errno 2] No such file or directory"),
    ],
)
def test_what_is_said(answer: Any, status: int, said: str, tmp_path: Path, capsys: Any) -> None:
    program = tmp_path / "pip_audit.py"
    if isinstance(answer, str):
        program.write_text(f"import sys; sys.exit({answer!r})")
    else:
        program.write_text(f"print({json.dumps({'dependencies': answer})!r})")
    command = [str(tmp_path / "nowhere")] if answer is None else [sys.executable, str(program)]
    assert audit.main(command) == status
    assert said in capsys.readouterr().out
