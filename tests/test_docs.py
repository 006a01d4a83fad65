"""The code in the documents runs as it stands."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest
import yaml

import cdt_fast
from cdt_fast import models, ops
from cdt_fast.cli.parser import build_parser

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")] + sorted(ROOT.glob("docs/*.md"))
BLOCKS = [
    pytest.param(match, id=f"{document.name}-{number}")
    for document in DOCUMENTS
    for number, match in enumerate(re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL))
]

# The code and the tests, without what stands on the machine beside them.
SOURCES = [path for part in ("cdt_fast", "kernels", "models", "bench", "tests") for path in (ROOT / part).rglob("*.py")]


@pytest.mark.parametrize("code", BLOCKS)
def test_python_in_documents_runs_and_leaves_runs_alone(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = re.findall(r"\bruns/[\w-]+", "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS))
    assert "runs/mine" in named
    for name in ("config.toml", "model/config.json", "model/model.safetensors", "model/tokenizer.json"):
        for run in set(named):
            (tmp_path / run / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / run / name).write_text("of a run")
    before = _files(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "<document>", "exec"), {"__name__": "document"})
    assert _files(tmp_path / "runs") == before


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub forms them."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_documents_link_to_files_and_headings_that_exist() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?://)([^)]+)\)", document.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            path = document.parent / name if name else document
            assert path.exists(), f"{document.name} links to {target}, which is not there"
            assert not anchor or anchor in _anchors(path), f"{document.name} links to {target}: no such heading"


def test_files_that_documents_name_exist() -> None:
    folders = "bench|cdt_fast|docs|kernels|models|tests"
    today = [document for document in DOCUMENTS if document.name != "CHANGELOG.md"]
    for document in today:
        for name in re.findall(rf"`((?:{folders})/[\w./-]+\.\w+)`", document.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{document.name} names {name}, which is not there"


def test_every_page_can_be_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for document in ROOT.glob("docs/*.md"):
        assert f"(docs/{document.name})" in readme, document.name


def test_the_citation_is_of_this_version_and_of_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert project is not None
    assert citation["version"] == project[1] == cdt_fast.__version__
    (paper,) = citation["references"]
    assert paper["url"].endswith("2601.17257")
    assert f"({paper['url']})" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_public_name_has_a_docstring() -> None:
    for module in (cdt_fast, ops, models):
        for name in module.__all__:
            assert inspect.getdoc(getattr(module, name)), f"{module.__name__}.{name}"


def test_commands_in_documents_parse() -> None:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for line in re.findall(r"^ +(?:\.venv/bin/)?cdt-fast (.+)$", text, re.MULTILINE):
            words = [word for word in shlex.split(line, comments=True) if word != "$options"]  # of a loop over runs
            build_parser().parse_args(words)


def test_every_cited_section_exists() -> None:
    cited = {
        (page, number)
        for path in SOURCES
        for page, number in re.findall(r"docs/(\w+)\.md §(\d)", path.read_text(encoding="utf-8"))
    }
    assert len(cited) > 5
    for page, number in cited:
        assert f"\n## §{number} " in (ROOT / f"docs/{page}.md").read_text(encoding="utf-8"), (page, number)
