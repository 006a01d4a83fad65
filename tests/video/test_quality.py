from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cdt_fast.checks import InputError
from cdt_fast.models import DUST, DenoisingDUST
from cdt_fast.video.comparison import _of_a_camera, as_table, compare_denoisers, peers, read_clips, write_report
from cdt_fast.video.noise import finest_noise
from cdt_fast.video.quality import SHIFTS, dct3d_denoise, dct3d_shifted_denoise, psnr_of, ssim
from cdt_fast.video.settings import VideoSettings
from tests.tiny import scrolling_clip


def test_psnr_is_that_of_its_definition() -> None:
    assert psnr_of(25.5) == pytest.approx(20.0)
    assert psnr_of(0.0) == math.inf


@pytest.mark.parametrize("size", [(16, 23), (40, 11)])
def test_ssim_is_that_of_torchmetrics(size: tuple[int, int]) -> None:
    metrics = pytest.importorskip("torchmetrics.functional.image")
    torch.manual_seed(0)
    clean = torch.rand(2, 3, *size)
    noisy = (clean + 0.2 * torch.randn_like(clean)).clamp(0, 1)
    _, everywhere = metrics.structural_similarity_index_measure(
        noisy.flatten(0, 1).unsqueeze(1),
        clean.flatten(0, 1).unsqueeze(1),
        data_range=1.0,
        reduction="none",
        return_full_image=True,
    )
    # torchmetrics has windows beyond the frame too, over its mirror image; those within it are the definition's.
    expected = everywhere[..., 5:-5, 5:-5].mean((1, 2, 3))
    torch.testing.assert_close(ssim(noisy, clean).flatten(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ssim(clean, clean), torch.ones(2, 3), rtol=0, atol=1e-5)
    assert ssim(clean[..., :5, :5], clean[..., :5, :5]).shape == (2, 3)


def test_the_shifted_transform_is_the_mean_over_moved_grids_and_beats_one() -> None:
    torch.manual_seed(0)
    rows = torch.linspace(0, 3, 24).sin().unsqueeze(1) * torch.linspace(0, 5, 32).cos() / 3 + 0.5
    clean = rows.expand(1, 4, 24, 32)
    noisy = clean + 0.1 * torch.randn_like(clean)
    found = dct3d_shifted_denoise(noisy, 0.1, 8)
    total = torch.zeros_like(noisy)
    for top in range(0, 8, 8 // SHIFTS):
        for left in range(0, 8, 8 // SHIFTS):
            moved = torch.nn.functional.pad(noisy, (left, -(left + 32) % 8, top, -(top + 24) % 8), mode="reflect")
            total += dct3d_denoise(moved, 0.1, 8)[..., top : top + 24, left : left + 32]
    torch.testing.assert_close(found, total / SHIFTS**2, rtol=0, atol=1e-6)
    errors = [(given - clean).square().mean() for given in (found, dct3d_denoise(noisy, 0.1, 8), noisy)]
    assert errors[0] < 0.7 * errors[1] < errors[2]


def test_a_run_is_compared_with_other_denoisers_on_clips_of_anyone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "clip.npy", scrolling_clip(20, 40, 50))
    settings = VideoSettings.chosen({"data": {"window": 8}})
    model = DenoisingDUST(layers=2)
    found = compare_denoisers(model, settings, read_clips([str(tmp_path / "clip.npy")]), [20.0, 50.0])
    by_name = {each.name: each for each in found.measured}
    noisy = by_name["noisy frames"]
    assert noisy.psnr[::2] == pytest.approx([psnr_of(20.0), psnr_of(10.0)], abs=0.1)
    assert psnr_of(50.0) < noisy.psnr[1] < psnr_of(45.0)  # clipped as in a file
    for name, each in by_name.items():
        if name != "noisy frames":
            assert each.psnr[1] > noisy.psnr[1] + 0.5, name
            assert len(each.psnr) == len(each.ssim) == 3
        assert each.rate > 0
        # All show the same frame.
        assert (each.shown - found.clean).square().mean() <= (noisy.shown - found.clean).square().mean()
    told = by_name["cdt_fast, 2 of 2 layers"].psnr
    assert told[1] > noisy.psnr[1] + 6  # the start of the training is a threshold
    assert by_name["cdt_fast, noise estimated"].psnr == pytest.approx(told, abs=0.5)
    heading, first, *rest = as_table(found)
    assert heading[1:6] == ["σ 20", "σ 50", "mean", "SSIM", "a camera's, σ 10"]
    assert first[3] == f"{np.mean(noisy.psnr[:2]):.2f}"
    assert {len(row) for row in (first, *rest)} == {len(heading)}
    write_report(tmp_path / "clips.html", found, "a command")
    text = (tmp_path / "clips.html").read_text()
    assert text.count("<tr>") == 1 + len(found.measured)
    assert text.count("data:image/png;base64,") == 1
    assert "frames a second at 50x40" in text
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_report(tmp_path / "clips.html", found, "a command")
    text = (tmp_path / "clips.html").read_text()
    assert text.count("<tr>") == 1 + len(found.measured)
    assert "No picture: drawing a report needs the package" in text
    with pytest.raises(InputError, match="low: is 50x12, and clips of at least 16x16 are measured"):
        compare_denoisers(model, VideoSettings(), [("low", scrolling_clip(20, 12, 50), 20)])
    with pytest.raises(InputError, match="short: has 3 frames"):
        compare_denoisers(model, VideoSettings(), [("short", scrolling_clip(3, 40, 50), 3)])
    whole = VideoSettings.chosen({"data": {"frames": "resized"}})
    with pytest.raises(InputError, match="--clips compares a network for crops"):
        compare_denoisers(DUST(64, 64, 1), whole, [], [20.0])


def test_of_a_camera_s_noise_filters_are_told_what_is_best_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    shown: list[torch.Tensor] = []
    named = {
        "noisy frames": lambda frames, _: shown.append(frames) or frames,
        "ffmpeg, bm3d": lambda frames, s: given.append(s) or frames,
    }
    monkeypatch.setattr("cdt_fast.video.comparison.peers", lambda: named)
    compare_denoisers(DenoisingDUST(layers=1), VideoSettings(), [("clip", scrolling_clip(16, 40, 50), 16)], [20.0])
    assert given == [20.0, pytest.approx(14.0), 20.0]  # white, a camera's, and what is timed
    assert all(torch.equal((255 * frames).round().clamp(0, 255) / 255, frames) for frames in shown)  # as of a file


def test_the_noise_of_a_camera_is_that_of_a_row_of_colors_filled_in() -> None:
    raw = torch.zeros(1, 8, 8)
    raw[0, 3, 3], raw[0, 4, 4] = 1, 1  # two green pixels, which share two neighbors
    found = _of_a_camera(raw)[0]
    expected = torch.zeros(8, 8)
    for place in (3, 4):
        expected[place, place] += 1
        for row, column in ((place - 1, place), (place + 1, place), (place, place - 1), (place, place + 1)):
            expected[row, column] += 0.25
    torch.testing.assert_close(found / found.max(), expected)
    noise = _of_a_camera(torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)))
    assert noise.std().item() == pytest.approx(1)
    assert finest_noise(noise) < 0.6


def test_a_filter_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ffmpeg, nlmeans" in peers()
    monkeypatch.setattr("av.filter.filters_available", {"bm3d"})
    assert list(peers()) == ["noisy frames", "3-D DCT, shifted grids", "ffmpeg, bm3d"]
