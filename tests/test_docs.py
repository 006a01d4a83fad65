"""The code in the documents runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = [
    pytest.param(match, id=f"{document.name}-{number}")
    for document in sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"])
    for number, match in enumerate(re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.parametrize("code", BLOCKS)
def test_python_in_documents_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "<document>", "exec"), {"__name__": "document"})


def test_documents_link_to_files_that_exist() -> None:
    for document in [*ROOT.glob("docs/*.md"), ROOT / "README.md"]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}, which is not there"
