"""A run folder: made once, trained by one process at a time, and read after a power cut."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cdt_fast.checks import InputError
from cdt_fast.files import try_lock, write_text
from cdt_fast.tasks import open_run
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.settings import VideoSettings


def test_a_folder_in_use_or_without_a_trained_run_is_refused(tmp_path: Path) -> None:
    mine = RunFolder.create(tmp_path / "runs" / "mine", VideoSettings())
    assert mine.name == "mine"
    assert open_run(mine.path, trained=False)[1] == VideoSettings()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "note").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    known = ((mine.path, "--resume"), ("other", "is not empty"), ("other/note", "cannot be made"))
    for path, fact in (*known, ("link", "cannot be made"), ("link/run", "cannot be made")):
        with pytest.raises(InputError, match=fact):
            RunFolder.create(tmp_path / path, VideoSettings())
    foreign, settings = os.fsdecode(b"caf\xe9"), VideoSettings()
    settings.data.source = foreign
    for path, given in (("new", settings), (foreign, VideoSettings())):
        with pytest.raises(InputError, match="is not UTF-8: rename it"):
            RunFolder.create(tmp_path / path, given)
        assert not (tmp_path / path).exists()
    for path, fact in ((tmp_path, "no run folder"), ("nowhere", "no run folder"), (mine.path, "no model yet")):
        with pytest.raises(InputError, match=fact):
            open_run(tmp_path / path)


def test_only_a_run_without_results_is_removed(tmp_path: Path) -> None:
    for number, name in enumerate(["metrics.jsonl", "checkpoint/state.safetensors"]):
        run = RunFolder.create(tmp_path / str(number), VideoSettings())
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_text('{"step": 10}\n')
        run.remove_if_untouched()
        assert run.config.exists()
    for name in ("untouched", "untrained"):
        run = RunFolder.create(tmp_path / name, VideoSettings())
        run.metrics.touch()
        if name == "untrained":
            run.append_metrics({"step": 0, "validation": {"loss": [1.0, 1.0]}})
            run.model.mkdir()
        run.remove_if_untouched()
        assert not run.path.exists()


def test_only_leftovers_of_a_training_are_removed(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", VideoSettings())
    (run.path / ".evaluation-x.tmp.json").touch()  # another process may be writing it
    before = sorted(run.path.rglob("*"))
    for name in (".metrics-x.tmp.jsonl", ".model-x.tmp/config.json", "model/.model-x.tmp.safetensors"):
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).touch()
    run.remove_leftovers()
    assert sorted(run.path.rglob("*")) == sorted([*before, run.model])


@pytest.mark.parametrize("rest", ['{"step": 4, "lo', "\0\0\0\0", '{"step": 4}', "", "4"])
def test_a_last_line_that_was_not_finished_is_left_out(tmp_path: Path, rest: str) -> None:
    run = RunFolder(tmp_path)
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n' + rest)
    steps = [entry["step"] for entry in run.read_metrics()]
    assert steps == ([1, 2, 3, 4] if rest == '{"step": 4}' else [1, 2, 3])
    run.truncate_metrics(2)
    assert run.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'
    run.metrics.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(InputError, match="line 2"):
        run.read_metrics()


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path: Path) -> None:
    """A second descriptor is refused the lock, whichever process it is of."""
    run = RunFolder.create(tmp_path / "mine", VideoSettings())
    before = {path: path.read_bytes() for path in run.path.iterdir()}

    def is_refused() -> None:
        with pytest.raises(InputError, match=r"mine: another process is training this run"), run.lock():
            pass

    with run.lock():
        is_refused()
        write_text(run.config, run.config.read_text())  # as an editor does
        is_refused()
        assert open_run(run.path, trained=False)[1] == VideoSettings()
    with run.config.open("r+b") as file:
        assert try_lock(file)  # of the settings alone, as on NFS
        is_refused()
    with run.lock():
        pass
    assert {path: path.read_bytes() for path in run.path.iterdir()} == before


def test_of_runs_that_are_made_in_one_folder_at_once_one_is_whole(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = [pool.submit(RunFolder.create, tmp_path / "mine", VideoSettings()) for _ in range(8)]
    assert sum(future.exception() is None for future in made) == 1
    assert all(isinstance(error, InputError) for future in made if (error := future.exception()))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.toml"]
    assert open_run(tmp_path / "mine", trained=False)[1] == VideoSettings()
