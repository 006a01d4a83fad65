# pyright: reportReturnType=false
# PyAV's types allow None wherever FFmpeg does.
from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from fractions import Fraction
from pathlib import Path
from typing import Any

import av.error
import numpy as np
import pytest
import torch
from torch.nn.functional import avg_pool2d, interpolate

import cdt_fast
from cdt_fast.checks import InputError
from cdt_fast.files import read_json, try_lock, write_json
from cdt_fast.models import DUST
from cdt_fast.tasks import open_run
from cdt_fast.training.checkpoint import load_checkpoint, save_checkpoint
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video import writing
from cdt_fast.video.data import open_source, to_patches
from cdt_fast.video.denoising import Denoising, _with_scene, denoise_video
from cdt_fast.video.networks import SHIPPED, build_network, load_network
from cdt_fast.video.noise import WHITE, Noise
from cdt_fast.video.settings import VideoSettings
from cdt_fast.video.task import build, load
from cdt_fast.video.writing import CONTAINERS
from tests.runs import Call
from tests.tiny import scrolling_clip
from tests.video.clips import colored, denoised, encode


def decoded(path: Path) -> tuple[np.ndarray, Fraction]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return np.stack(frames), stream.average_rate


def shipped(sigma: float | None = None, depth: int = 3, **data: int) -> Denoising:
    """The network that comes with the package."""
    return Denoising(load_network(SHIPPED), VideoSettings.chosen({"data": data}), depth, sigma)


@pytest.mark.parametrize("suffix", CONTAINERS)
@pytest.mark.parametrize(
    ("count", "height", "width", "rate"),
    [
        (10, 32, 48, Fraction(25)),
        (13, 33, 47, Fraction(30000, 1001)),
        (17, 1, 1, Fraction(10)),
        (2, 5, 34, Fraction(1)),
    ],
)
def test_the_output_plays_like_the_input(
    tmp_path: Path, suffix: str, count: int, height: int, width: int, rate: Fraction
) -> None:
    """Same size, rate and frames, in order: odd sides, windows that do not fill up, fewer frames than one patch."""
    frames = colored(count, height, width)
    source = encode(tmp_path / "in.mkv", frames, "ffv1", "bgr0", rate=rate)
    target = tmp_path / f"out{suffix}"
    told = denoised(source, target)
    written, written_rate = decoded(target)
    assert written.shape == frames.shape
    assert written_rate == rate
    size = {"frames": count, "width": width, "height": height}
    notes = [] if height % 2 or width % 2 else ["does not come through: half the resolution of its colors"]
    assert told == {**size, "frame_rate": float(rate), "depth": 1, "layers": 1, "sigma": None, "notes": notes}
    # x264 loses little, and halves the resolution of color where the sides are even.
    error = (written.astype(float).mean(-1) - frames.astype(float).mean(-1)) ** 2
    assert np.sqrt(error.mean((1, 2))).max() < 6
    assert np.abs(written.astype(float).mean((1, 2)) - frames.mean((1, 2))).max() < 4  # no shift of the colors
    assert sorted(os.listdir(tmp_path)) == sorted(["in.mkv", target.name])


def test_frames_are_those_of_the_model_in_every_plane_and_window(trained: Any) -> None:
    """The last window, which two frames do not fill, begins with frames from before."""
    run, config = open_run(trained.constrained)
    model = DUST.from_pretrained(run.model)
    frames = colored(7, 11, 18)
    found = np.stack(list(Denoising(model, config, 1).frames(frames)))
    assert found.shape == frames.shape
    padded = np.pad(frames, ((0, 0), (0, 5), (0, 6), (0, 0)), mode="reflect")
    for first, last, used in ((0, 5, slice(0, 5)), (2, 7, slice(3, 5))):
        for plane in range(3):
            window = torch.from_numpy(padded[first:last, ..., plane].copy()).float().unsqueeze(0) / 255
            with torch.no_grad():
                expected = model(to_patches(window, 8, "time"), depth=1)
            expected = expected.reshape(2, 3, 5, 8, 8).permute(2, 0, 3, 1, 4).reshape(5, 16, 24)[used, :11, :18]
            shown = (expected * 255).round().clamp(0, 255)
            there = torch.from_numpy(found[first:last][used, ..., plane].copy()).float()
            assert (there - shown).abs().max() <= 1


def test_a_network_comes_with_the_package(call: Call, tmp_path: Path) -> None:
    clean = scrolling_clip(16, 64, 64).astype(float)
    noisy = np.clip(clean + 20 * np.random.default_rng(0).standard_normal(clean.shape), 0, 255).astype(np.uint8)
    np.save(tmp_path / "noisy.npy", noisy)
    answer = call("denoise", tmp_path / "noisy.npy", tmp_path / "clean.mkv")
    assert answer.status == 0
    assert "16 frames, 64x64" in answer.out
    errors = [np.square(frames - clean).mean() for frames in (noisy, decoded(tmp_path / "clean.mkv")[0].mean(-1))]
    assert errors[1] < errors[0] / 5
    settings = VideoSettings()
    started, scratch = build_network(settings), build_network(settings.chosen({"model": {"scratch": True}}))
    shipped = load_network(SHIPPED).state_dict()
    assert all(torch.equal(value, shipped[name]) for name, value in started.state_dict().items())
    assert not torch.equal(scratch.state_dict()["dictionary"], shipped["dictionary"])
    assert build_network(settings.chosen({"model": {"layers": 4}})).layers == 4  # which it does not fit


def test_a_network_of_one_layer_is_trained(call: Call, tmp_path: Path, quick_figures: None) -> None:
    """One of its parameters is empty."""
    np.save(tmp_path / "clip.npy", scrolling_clip(90, 32, 32))
    words = ["--layers", 1, "--steps", 1, "--batch", 1, "--size", 16, "--device", "cpu"]
    assert call("train", "video", tmp_path / "clip.npy", "--out", tmp_path / "run", *words).status == 0


@pytest.mark.parametrize(
    ("model", "training", "expected"),
    [({}, {}, 0.001), ({"scratch": True}, {}, 0.01), ({"layers": 4}, {}, 0.01), ({"scratch": True}, {"lr": 0.0}, 0.0)],
)
def test_a_new_network_learns_faster(model: dict[str, Any], training: dict[str, Any], expected: float) -> None:
    settings = VideoSettings.chosen({"data": {"source": "demo"}, "model": model, "training": training})
    workload = build(settings, load(settings, progress=False), torch.device("cpu"))
    assert workload.lr == expected
    assert workload.description.endswith("the network of the package" if not model else "cosines")


def test_frames_in_memory_are_denoised_as_those_of_a_file(tmp_path: Path) -> None:
    clean = scrolling_clip(20, 24, 32)
    noise = 20 * np.random.default_rng(0).standard_normal(clean.shape)
    gray = np.rint(clean + noise).clip(0, 255).astype(np.uint8)
    found = cdt_fast.denoise(gray)
    assert (found.shape, found.dtype) == (gray.shape, np.uint8)
    assert (found - clean.astype(float)).std() < 0.5 * (gray - clean.astype(float)).std()
    np.save(tmp_path / "gray.npy", gray)
    np.testing.assert_array_equal(cdt_fast.denoise(tmp_path / "gray.npy"), found)
    colors = np.repeat(gray[..., None], 3, 3)
    np.testing.assert_array_equal(cdt_fast.denoise(colors), np.repeat(found[..., None], 3, 3))
    assert np.abs(cdt_fast.denoise(gray / 255, sigma=20) - found.astype(int)).mean() < 2
    neither = torch.zeros(4, 16, 16), "video must be a path or a NumPy array of frames, got a Tensor"
    for wrong, message in ((gray.astype(int), "has dtype int64"), (gray[0], r"shape \[24, 32\]"), neither):
        with pytest.raises(InputError, match=message):
            cdt_fast.denoise(wrong)  # pyright: ignore[reportArgumentType]


def test_notes_of_a_file_are_warnings_in_python(tmp_path: Path) -> None:
    path = encode(tmp_path / "in.mkv", scrolling_clip(40, 32, 48))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.warns(UserWarning, match="may be damaged or cut short"):
        cdt_fast.denoise(path)


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = encode(tmp_path / "in.mkv", scrolling_clip(8, 32, 48)), tmp_path / "out.mp4"
    original = Denoising.frames
    monkeypatch.setattr(Denoising, "frames", lambda *given: (target.write_text("mine"), original(*given))[1])
    with pytest.raises(InputError, match=r"out\.mp4: exists already"):
        denoise_video(load_network(SHIPPED), VideoSettings(), source, target)
    assert (target.read_text(), [path.name for path in tmp_path.iterdir() if "tmp" in path.name]) == ("mine", [])


def test_an_excerpt_is_those_frames_at_their_times(call: Call, tmp_path: Path) -> None:
    frames = np.repeat(scrolling_clip(20, 16, 24)[..., None], 3, 3)
    source, target = encode(tmp_path / "in.mkv", frames, "ffv1", "bgr0"), tmp_path / "out.mp4"
    words = ("denoise", source, target, "--depth", 0, "--overwrite")
    for given, part in (("3:9", slice(3, 9)), (":4", slice(0, 4)), (f"15:{10**30}", slice(15, 20))):
        assert call(*words, "--frames", given).status == 0
        shown, rate = decoded(target)
        assert (len(shown), rate) == (len(frames[part]), 25)
        right, wrong = (np.abs(shown - other[part]).mean() for other in (frames * 1.0, np.roll(frames * 1.0, 1, 0)))
        assert right < wrong / 2
    for given in ("5", "9:3", "a:b", "-1:4"):
        assert (
            "--frames: must be the first frame and the one after the last" in call(*words, f"--frames={given}").line()
        )
    assert "no frames found in 30:40" in call(*words, "--frames", "30:40").line()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_a_few_frames_lose_their_noise_too(count: int) -> None:
    """Frames that are repeated to fill a patch repeat their noise, of which the network must be told."""
    clean = np.repeat(scrolling_clip(count, 48, 48)[..., None] // 4 + 60, 3, -1)
    noise = 20 * np.random.default_rng(0).standard_normal((count, 48, 48, 1))
    noisy = np.clip(clean + noise, 0, 255).astype(np.uint8)
    found = np.stack(list(shipped(20.0).frames(noisy)))
    before, after = (np.square(frames - clean.astype(float)).mean((1, 2, 3)) for frames in (noisy, found))
    assert found.shape == clean.shape
    assert (after < before / 5).all()


@pytest.mark.parametrize("count", [7, 8, 9, 11, 12, 14, 15, 20, 21, 22, 32])
def test_windows_share_frames(count: int) -> None:
    """Windows of 12, of a model trained on 8, share two frames, of which the later one has a third and two thirds."""
    noisy = np.random.default_rng(0).integers(0, 256, (count, 24, 24, 1), np.uint8)
    denoising, length = shipped(20.0, window=8), 12
    if count <= 12:
        length = count // 4 * 4
    elif count <= 14:  # two of the same length
        length = 8
    expected = torch.zeros(noisy.shape)
    for begin in range(0, count - 2, length - 2):
        # The last one is shorter or begins earlier: as many patches as hold its frames, and no fewer than in training.
        part = min(length, max(8, -(-(count - begin) // 4) * 4), count // 4 * 4)
        start = min(begin, count - part)
        window = denoising._window(noisy[start : start + part])[begin - start :]
        shares = torch.tensor([1 / 3, 2 / 3] if begin else [1.0, 1.0])
        for place, share in zip(range(begin, start + part), (*shares, *[1.0] * 10), strict=False):
            expected[place] = share * window[place - begin] + (1 - share) * expected[place]
    torch.testing.assert_close(torch.stack(list(denoising.exact(noisy))), expected)


@pytest.mark.parametrize("cut", [1, 5, 13, 27, 29])
def test_windows_end_at_a_cut(cut: int) -> None:
    """Of a scene no frame has a ghost of the other, wherever the cut is."""
    noise = 25 * np.random.default_rng(0).standard_normal((30, 24, 40))
    noisy = (noise + np.linspace(50, 180, 40)).clip(0, 255).astype(np.uint8)[..., None]
    noisy[cut:] = noisy[cut:, :, ::-1]
    denoising = shipped(25.0)
    expected = [*denoising.frames(noisy[:cut]), *denoising.frames(noisy[cut:])]
    np.testing.assert_array_equal(list(denoising.frames(noisy)), expected)


@pytest.mark.parametrize("repeated", [1, 3, 6, 12])
def test_a_flash_and_fast_motion_are_no_cuts(repeated: int) -> None:
    clip = scrolling_clip(180, 64, 64)[::9].repeat(repeated, 0)
    clip[7:9] = 255
    assert {scene for scene, _ in _with_scene(clip[..., None])} == {0}


@pytest.mark.parametrize("side", [1, 2, 8, 32])
def test_noise_of_two_frames_is_no_cut(side: int) -> None:
    noise = np.random.default_rng(0).normal(128, 25 if side > 8 else 5, (2, side, side, 3))
    assert {scene for scene, _ in _with_scene(noise.astype(np.uint8))} == {0}


@pytest.mark.parametrize("channels", [1, 3])
def test_noise_that_was_clipped_leaves_black_black(channels: int) -> None:
    clean = np.full((16, 48, 48, channels), 6.0)
    clean[:, :, 24:] = 120.0
    noisy = np.rint(clean + 30 * np.random.default_rng(0).standard_normal(clean.shape)).clip(0, 255).astype(np.uint8)
    found = cdt_fast.denoise(noisy.squeeze(), sigma=30.0)
    assert found[:, :, 30:].mean() == pytest.approx(120, abs=1)
    assert noisy[:, :, :18].mean() > 15
    assert found[:, :, :18].mean() == pytest.approx(6, abs=3)


@pytest.mark.parametrize("few", [False, True])
def test_large_frames_are_denoised_by_bands_of_rows(monkeypatch: pytest.MonkeyPatch, few: bool) -> None:
    """A layer sees no further than its patches reach, and so a band with enough around it is as the whole."""
    noisy, noise = torch.rand(1, 8, 85, 40, generator=torch.Generator().manual_seed(0)), Noise(20 / 255, (0.1, 0.1))
    for depth in (1, 3):
        denoising = shipped(depth=depth)
        whole = denoising.plane(noisy, 1.0, noise, few_grids=few)
        for rows in (1, 16, 84):
            monkeypatch.setattr("cdt_fast.video.denoising._PIXELS_AT_ONCE", rows * 8 * 40)
            torch.testing.assert_close(denoising.plane(noisy, 1.0, noise, few_grids=few), whole, rtol=0, atol=2e-6)
        monkeypatch.undo()


@pytest.mark.parametrize("sigma", [None, 16.0], ids=["estimated", "told"])
def test_blurred_noise_is_removed_as_what_it_is(sigma: float | None) -> None:
    clean = torch.from_numpy(scrolling_clip(12, 96, 96)) / 510 + 0.25
    white = torch.randn(12, 98, 98, generator=torch.Generator().manual_seed(0)) * 38 / 255
    noisy = (clean + avg_pool2d(avg_pool2d(white, 2, 1), 2, 1)).mul(255).round() / 255  # a = 1/4, deviation 14
    denoising = shipped(sigma)
    found = torch.stack(list(denoising.exact((255 * noisy[..., None]).byte().numpy()))).squeeze(-1)
    as_white = [denoising.plane(noisy[None], 1.0, Noise(level / 255, WHITE))[0] for level in (16, 20)]
    errors = [(each - clean).square().mean() for each in (found, *as_white)]
    assert errors[0] < 0.6 * min(errors[1:])


def test_blurred_noise_of_color_is_taken_for_that_too(monkeypatch: pytest.MonkeyPatch) -> None:
    white = torch.randn(3, 12, 98, 98, generator=torch.Generator().manual_seed(0))
    noisy = (128 + 30 * avg_pool2d(avg_pool2d(white, 2, 1), 2, 1)).clamp(0, 255).byte().permute(1, 2, 3, 0).numpy()
    found = []
    monkeypatch.setattr(Denoising, "plane", lambda self, plane, copies, noise, **_: found.append(noise.blur) or plane)
    list(shipped().frames(noisy))
    assert len(found) == 3
    assert min(map(min, found)) > 0.1


def test_coarse_noise_of_color_at_half_the_size_is_that_of_a_coder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    white, coarse = torch.randn(16, 96, 128, generator=generator), torch.randn(16, 1, 24, 32, generator=generator)
    noise = (6 * white + 20 * interpolate(coarse, (96, 128), mode="bilinear")[:, 0])[..., None]
    frames = (128 + noise * torch.tensor([1, -1, 0])).byte().numpy()
    found = []
    monkeypatch.setattr(Denoising, "plane", lambda self, plane, copies, noise, **_: found.append(noise) or plane)
    coded = open_source(encode(tmp_path / "half.mkv", frames.repeat(2, 1).repeat(2, 2), "ffv1"))
    for given in (frames, coded.frames()):  # colors at full size, and at half as in a file
        list(shipped().frames(given))
    whole, half = found[1], found[4]
    assert half.deviation > 1.3 * whole.deviation


@pytest.mark.parametrize("size", [1, 2])
def test_noise_of_color_is_removed_where_brightness_has_less(size: int) -> None:
    random = np.random.default_rng(0)
    clean = np.repeat(scrolling_clip(8, 64, 96)[..., None], 3, -1) // 2 + 60
    drawn = random.standard_normal((8, 64 // size, 96 // size)).repeat(size, 1).repeat(size, 2)
    colors = 20 * drawn[..., None] * np.array([1, -1, 0])
    noise = colors + 3 * random.standard_normal((8, 64, 96, 1))
    noisy = np.rint(clean + noise).clip(0, 255).astype(np.uint8)
    denoising = shipped()
    found = np.stack(list(denoising.frames(noisy)))
    assert denoising.found == [pytest.approx(3 * 3**0.5, rel=0.3)]
    before, after = (np.square(frames - clean.astype(float)).mean() for frames in (noisy, found))
    assert after < before / 10
    told = np.stack(list(shipped(5.0).frames(noisy)))
    assert np.square(told - clean.astype(float)).mean() > before / 10


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"success": True}, ""),
        ({"success": False, "verdict": "no success: it is worse; so"}, "is no success: it is worse; so"),
        ({"trained_steps": 20, "success": False}, "was trained further since its evaluation (after step 20)"),
        ("evaluation.json", "was never evaluated"),
        ({"layer_loss": None}, "was never evaluated"),
        ("cut short", "was never evaluated"),
        ("copied for its model", ""),
        ("unfinished", "is not finished (step 12 of 30) and was trained further since its evaluation (after step 3)"),
        ("begun", "is not finished (step 0 of 30) and was never evaluated"),
    ],
)
def test_what_speaks_against_a_run_is_said_before_anything_is_written(
    call: Call, copied_run: RunFolder, clip: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, change: Any, said: str
) -> None:
    evaluation = {**read_json(copied_run.evaluation), "success": True}
    if change == "unfinished":
        save_checkpoint(copied_run.checkpoint, {**load_checkpoint(copied_run.checkpoint), "step": 12})
        evaluation["trained_steps"] = 3
    write_json(copied_run.evaluation, {**evaluation, **(change if isinstance(change, dict) else {})})
    if change in ("evaluation.json", "begun"):
        copied_run.evaluation.unlink()
    if change == "cut short":
        copied_run.evaluation.write_text("{")
    if change in ("copied for its model", "begun"):
        shutil.rmtree(copied_run.checkpoint.parent)
    expected = f"cdt-fast: note: {copied_run.path}: {said}\n" if said else ""
    answer = call("denoise", "--run", copied_run.path, clip, tmp_path / "out.mp4", "--depth", 1)
    assert (answer.status, answer.err) == (0, expected)
    monkeypatch.setattr("cdt_fast.video.denoising.write_video", lambda *_: pytest.fail("it writes"))
    with pytest.raises(pytest.fail.Exception):
        call("denoise", "--run", copied_run.path, clip, tmp_path / "again.mp4")
    assert capsys.readouterr().err == expected


def test_every_depth_is_an_early_exit(call: Call, trained: Any, clip: Path, tmp_path: Path) -> None:
    shown = []
    for depth in range(3):
        target = tmp_path / f"{depth}.mp4"
        assert call("denoise", "--run", trained.constrained, clip, target, "--depth", depth).status == 0
        shown.append(decoded(target)[0].astype(float))
    clean = np.load(clip).astype(float)[..., np.newaxis]
    errors = [np.sqrt(((frames - clean) ** 2).mean()) for frames in shown]
    assert errors[0] > errors[1] > errors[2]
    target = tmp_path / "all.mp4"
    answer = call("denoise", "--run", trained.constrained, clip, target)
    assert answer.err.startswith(f"cdt-fast: note: {trained.constrained}: is no success: ")  # of six steps
    assert answer.err.count("\n") == 1
    said = f"{target}: 60 frames, 32x32, 25 a second, 2 of 2 layers; done in "
    assert re.fullmatch(re.escape(said) + r"\d+ s, [\d.]+ frames a second\n", answer.out)
    assert np.ptp(shown[2], axis=-1).max() <= 3  # gray stays gray
    # x264 looks ahead in a thread of its own, and does not always come to the same bits.
    assert np.abs(decoded(target)[0] - shown[2]).mean() < 2 < np.abs(shown[1] - shown[2]).mean()
    for depth in (-1, 3):
        line = call("denoise", "--run", trained.constrained, clip, "x.mp4", f"--depth={depth}").line()
        assert "depth must be an integer from 0 to 2" in line


def test_bad_targets_are_one_line_and_change_nothing(
    call: Call, trained: Any, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    existing = tmp_path / "existing.mp4"
    existing.write_bytes(b"precious")
    (tmp_path / "folder.mp4").mkdir()
    for target, facts in [
        (existing, ["exists already", "--overwrite"]),
        ("out", ["has no suffix", ".mp4"]),
        ("out.xyz", ["ends in .xyz", ".mp4"]),
        ("out.avi", ["ends in .avi", ".mp4"]),
        ("nowhere/out.mp4", ["there is no folder nowhere"]),
        ("folder.mp4", ["is a folder"]),
    ]:
        line = call("denoise", "--run", trained.constrained, clip, target).line()
        for fact in facts:
            assert fact in line
    assert existing.read_bytes() == b"precious"
    assert sorted(os.listdir(tmp_path)) == ["existing.mp4", "folder.mp4"]
    assert call("denoise", "--run", trained.constrained, clip, existing, "--overwrite").status == 0
    before = existing.read_bytes()
    assert "is the source" in call("denoise", "--run", trained.constrained, existing, existing, "--overwrite").line()
    assert existing.read_bytes() == before


def test_a_source_that_breaks_off_leaves_no_output(call: Call, trained: Any, tmp_path: Path) -> None:
    frames = scrolling_clip(12).astype(np.float32) / 255
    frames[9, 3, 3] = np.nan
    np.save(tmp_path / "nan.npy", frames)
    target = tmp_path / "out.mp4"
    target.write_bytes(b"precious")
    line = call("denoise", "--run", trained.constrained, tmp_path / "nan.npy", target, "--overwrite").line()
    assert "frame 9" in line
    assert target.read_bytes() == b"precious"
    assert sorted(os.listdir(tmp_path)) == ["nan.npy", "out.mp4"]
    assert "missing.mp4" in call("denoise", "--run", trained.constrained, "missing.mp4", tmp_path / "none.mp4").line()
    assert not (tmp_path / "none.mp4").exists()


def test_a_full_disk_is_said_with_the_name_of_the_output(
    call: Call, trained: Any, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FFmpeg's own error, raised by a limit on the size of a file, and the same with the number of a full disk."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    target = tmp_path / "out.mkv"
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
        line = call("denoise", "--run", trained.constrained, clip, target).line()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert line == f"cdt-fast: {target}: File too large\n"
    assert not os.listdir(tmp_path)

    def full(*_: object) -> None:
        av.error.err_check(-errno.ENOSPC, "a temporary name")

    monkeypatch.setattr(Denoising, "_window", full)
    assert (
        call("denoise", "--run", trained.constrained, clip, target).line() == f"cdt-fast: {target}: the disk is full\n"
    )
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_a_killed_process_was_writing_is_removed(
    call: Call, trained: Any, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """At once after a signal that can be handled, else by the next one that writes the same file."""
    running, killed = (tmp_path / f".out-{digit * 8}.tmp.mp4" for digit in "01")
    killed.touch()
    with running.open("w") as file:
        try_lock(file)
        assert call("denoise", "--run", trained.constrained, clip, tmp_path / "out.mp4").status == 0
    assert sorted(os.listdir(tmp_path)) == [running.name, "out.mp4"]
    at_work = Denoising._window

    def stopped(*given: Any) -> torch.Tensor:
        assert len(os.listdir(tmp_path)) == 2
        signal.raise_signal(number)
        return at_work(*given)

    monkeypatch.setattr(Denoising, "_window", stopped)
    running.unlink()
    answer = call("denoise", "--run", trained.constrained, clip, tmp_path / "out.mp4", "--overwrite")
    assert (answer.status, answer.err.splitlines()[-1]) == (128 + number, f"cdt-fast: stopped by {number.name}")
    assert os.listdir(tmp_path) == ["out.mp4"]


def test_a_size_that_the_codec_refuses_is_one_line(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.zeros((3, 1, 20_000), dtype=np.uint8))
    with pytest.raises(InputError, match=r"out\.mp4: cannot be written as video"):
        denoised(tmp_path / "in.npy", tmp_path / "out.mp4")
    assert os.listdir(tmp_path) == ["in.npy"]


def test_the_same_frames_are_the_same_bytes(tmp_path: Path) -> None:
    np.save(tmp_path / "clip.npy", scrolling_clip())
    source = open_source(tmp_path / "clip.npy")
    numbers = np.random.default_rng(0)
    contents, kept = set(), []
    for _ in range(12):
        kept.append(np.full(numbers.integers(1, 100_000), 255, np.uint8))  # memory is not where, and what, it was
        frames = (np.random.default_rng(index).integers(0, 256, (32, 32, 1), np.uint8) for index in range(60))
        writing.write_video(tmp_path / "out.mp4", tmp_path / "out.mp4", frames, source)
        contents.add((tmp_path / "out.mp4").read_bytes())
    assert len(contents) == 1
