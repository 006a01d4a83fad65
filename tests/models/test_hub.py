"""Models on the hub: pushed to a stand-in for it, found again, and one line where it cannot be reached. No network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import tomli_w
import torch

from cdt_fast import models
from cdt_fast.errors import InputError

SMALL: dict[str, Any] = {"patch_size": 4, "code_size": 9, "layers": 2}


class Hub:
    """What of huggingface_hub is used: repositories are folders, and the cache is one more copy of them."""

    def __init__(self, folder: Path) -> None:
        self.remote, self.cache, self.calls = folder / "remote", folder / "cache", []

    def api(self) -> type:
        calls, remote = self.calls, self.remote

        class HfApi:
            def __init__(self, token: str | None = None) -> None:
                self.token = token

            def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> Any:
                assert exist_ok
                calls.append({"token": self.token, "private": private})
                return SimpleNamespace(repo_id=repo_id)

            def upload_folder(self, *, repo_id: str, folder_path: Path, **options: Any) -> str:
                shutil.copytree(folder_path, remote / repo_id, dirs_exist_ok=True)
                calls[-1].update(options)
                return f"https://hub/{repo_id}/commit/1"

        return HfApi

    def snapshot_download(self, name: str, *, allow_patterns: list[str], local_files_only: bool, **_: Any) -> str:
        if not local_files_only:
            if not (self.remote / name).is_dir():
                raise OSError(f"404 Client Error\n\nRepository Not Found for {name}")
            (self.cache / name).mkdir(parents=True, exist_ok=True)
            for file in allow_patterns:
                shutil.copy(self.remote / name / file, self.cache / name / file)
        if not (self.cache / name).is_dir():
            raise FileNotFoundError("not in the cache")
        return str(self.cache / name)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    stub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", stub.api())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stub.snapshot_download)
    return stub


def test_what_is_pushed_is_loaded_by_its_name(hub: Hub) -> None:
    model = models.DUST(**SMALL)
    address = model.push_to_hub("me/dust", private=True, token="secret", branch="dev", commit_message="first")
    assert address == "https://hub/me/dust/commit/1"
    expected = {"token": "secret", "private": True, "revision": "dev", "commit_message": "first", "create_pr": False}
    assert hub.calls == [expected]
    assert sorted(path.name for path in (hub.remote / "me/dust").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    with pytest.raises(InputError, match=r"^me/dust: no such folder, nor is it in the hub's cache; download=True"):
        models.load_pretrained("me/dust")
    for download in (True, False):  # once fetched, it is in the cache
        for load in (models.load_pretrained, models.DUST.from_pretrained):
            loaded = load("me/dust", download=download)
            assert loaded.config == model.config
            assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())
    with pytest.raises(InputError, match="holds a DUST, expected a VideoUT"):
        models.VideoUT.from_pretrained("me/dust")


def card_of(hub: Hub, name: str) -> dict[str, str]:
    text = (hub.remote / name / "README.md").read_text(encoding="utf-8")
    assert text.startswith("---\nlibrary_name: cdt_fast\n")
    return dict(line[2:].split(": ", 1) for line in text.splitlines() if line.startswith("- ") and ": " in line)


def test_the_card_says_what_is_known(hub: Hub, tmp_path: Path) -> None:
    model = models.DUST(**SMALL)
    model.push_to_hub("me/dust")
    card = card_of(hub, "me/dust")
    assert list(card) == ["Task", "Configuration", "Constraints", "Verdict", "Load", "Integrity"]
    assert (card["Task"], card["Constraints"], card["Verdict"]) == ("not recorded",) * 3
    assert card["Configuration"].startswith("DUST: patch_size 4, code_size 9, layers 2")
    run = tmp_path / "run"
    run.mkdir()
    constraints = {"constrained": True, "rate": 0.05, "slack": False, "coupling": "none", "bounds": "/home/me/run"}
    settings = {"task": "video", "data": {"source": "/home/me/clip.mp4"}, "constraints": constraints}
    (run / "config.toml").write_text(tomli_w.dumps(settings))
    (run / "evaluation.json").write_text(json.dumps({"report": {"text": "Feasible:\nevery layer descends."}}))
    model.push_to_hub("me/dust", run=run)
    card = card_of(hub, "me/dust")
    assert (card["Task"], card["Constraints"]) == ("video", "constrained True, rate 0.05")
    assert card["Verdict"] == "Feasible: every layer descends."
    assert "/home/me" not in (hub.remote / "me/dust/README.md").read_text(encoding="utf-8")
    with pytest.raises(InputError, match=r"config\.toml: cannot be read"):
        model.push_to_hub("me/dust", run=tmp_path / "nowhere")


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the hub's own library, which finds nobody at the address that it asks."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"^me/dust: no such folder, and it cannot be fetched from the hub \(.*\)$"):
        models.load_pretrained("me/dust", download=True)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda *_, **__: 1 / 0)
    with pytest.raises(InputError, match=r"^me/dust: cannot be pushed to the hub \(.*\)$"):
        models.DUST(**SMALL).push_to_hub("me/dust")
