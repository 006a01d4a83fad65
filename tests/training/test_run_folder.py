from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cdt_fast.errors import InputError
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.settings import VideoSettings
from tests.runs import open_run


def test_a_new_run_holds_its_settings(tmp_path: Path) -> None:
    config = VideoSettings()
    config.model.layers = 2
    run = RunFolder.create(tmp_path / "runs" / "mine", config)
    assert run.name == "mine"
    assert open_run(run.path, trained=False)[1] == config


def test_a_folder_in_use_is_not_taken(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "mine", VideoSettings())
    with pytest.raises(InputError, match="--resume"):
        RunFolder.create(tmp_path / "mine", VideoSettings())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "note").touch()
    with pytest.raises(InputError, match="no empty folder"):
        RunFolder.create(tmp_path / "other", VideoSettings())
    with pytest.raises(InputError, match="cannot be made"):
        RunFolder.create(tmp_path / "other" / "note", VideoSettings())
    RunFolder.create(tmp_path / "empty", VideoSettings())


def test_a_folder_that_is_no_run_or_not_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run folder"):
        open_run(tmp_path)
    with pytest.raises(InputError, match="no run folder"):
        open_run(tmp_path / "nowhere")
    RunFolder.create(tmp_path / "mine", VideoSettings())
    with pytest.raises(InputError, match="no model yet"):
        open_run(tmp_path / "mine")


def test_only_a_run_without_results_is_removed(tmp_path: Path) -> None:
    for number, name in enumerate(["metrics.jsonl", "checkpoint/state.safetensors", "model/config.json"]):
        run = RunFolder.create(tmp_path / str(number), VideoSettings())
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_text("something\n")
        run.remove_if_untouched()
        assert run.config.exists()
    run = RunFolder.create(tmp_path / "untouched", VideoSettings())
    run.metrics.touch()
    run.remove_if_untouched()
    assert not run.path.exists()
    run = RunFolder.create(tmp_path / "untrained", VideoSettings())
    run.append_metrics({"step": 0, "validation": {"loss": [1.0, 1.0]}})
    run.model.mkdir()
    run.remove_if_untouched()
    assert not run.path.exists()


@pytest.mark.parametrize("rest", ['{"step": 4, "lo', "\0\0\0\0", '{"step": 4}', "", "4"])
def test_a_last_line_that_was_not_finished_is_left_out(tmp_path: Path, rest: str) -> None:
    run = RunFolder(tmp_path)
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n' + rest)
    steps = [entry["step"] for entry in run.read_metrics()]
    assert steps == ([1, 2, 3, 4] if rest == '{"step": 4}' else [1, 2, 3])
    run.truncate_metrics(2)
    assert run.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_broken_line_in_the_middle_is_an_error_that_says_where(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.metrics.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(InputError, match="line 2"):
        run.read_metrics()


_HOLD = """
import sys
from cdt_fast.training.run_folder import RunFolder
from tests.runs import open_run
with RunFolder(sys.argv[1]).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_run_that_another_process_trains_is_refused_until_that_ends_or_is_killed(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "mine", VideoSettings())
    before = {path: path.read_bytes() for path in run.path.iterdir()}
    command = [sys.executable, "-c", _HOLD, str(run.path)]
    for end in ("close", "kill"):
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(InputError, match=r"mine: another process is training this run"), run.lock():
                pass
            with run.lock(main=False):  # another rank of the process that holds it
                pass
            assert open_run(run.path, trained=False)[1] == VideoSettings()
        finally:
            other.stdin.close() if end == "close" else other.kill()
            other.wait()
            other.stdout.close()
        with run.lock():
            pass
    assert {path: path.read_bytes() for path in run.path.iterdir()} == before


def test_of_runs_that_are_made_in_one_folder_at_once_one_is_whole(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)
    refused = []

    def make() -> None:
        barrier.wait()
        try:
            RunFolder.create(tmp_path / "mine", VideoSettings())
        except InputError as error:
            refused.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["config.toml"]
    assert open_run(tmp_path / "mine", trained=False)[1] == VideoSettings()
