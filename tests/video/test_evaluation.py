from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cdt_fast.files import read_json
from cdt_fast.models import DUST
from cdt_fast.models.dictionary import cosine_transform
from cdt_fast.tasks import open_run
from cdt_fast.training.evaluation import judged
from cdt_fast.training.optimizer import build_constraints
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.video.data import from_patches, to_patches
from cdt_fast.video.data.clips import Clip
from cdt_fast.video.data.windows import DecodedClip, Part, VideoData, Windows, load_clip
from cdt_fast.video.evaluation import baseline_errors, losses_of_samples, mean_rmse, measure
from cdt_fast.video.figures import keep_frames
from cdt_fast.video.networks import build_network
from cdt_fast.video.quality import THRESHOLD_FACTOR, dct3d_denoise
from cdt_fast.video.settings import VideoSettings
from tests.runs import Config, evaluate_run, load_data
from tests.tiny import scrolling_clip


def test_the_frames_that_a_report_shows_have_detail_and_are_what_is_measured(tmp_path: Path) -> None:
    config = VideoSettings.chosen({"model": {"layers": 1}})
    detailed, flat = scrolling_clip(8, 32, 32), np.full((8, 32, 32), 100, np.uint8)
    frames = np.concatenate([flat, detailed, flat])
    np.save(tmp_path / "clip.npy", frames)
    clips = [DecodedClip("whole", frames), load_clip(Clip("clip", tmp_path / "clip.npy"), 24, False, 8)]
    model = build_network(config)
    for clip in clips:  # of crops the frames that they were cut from
        windows = Windows([clip], [Part(0, 0, 24)], 8, clip.frames.shape[-1])
        keep_frames(tmp_path / "frames", model, VideoData(windows, windows, windows, 1 / 255, "", {}), config)
        assert (tmp_path / "frames").stat().st_mode == (tmp_path / "clip.npy").stat().st_mode
        clean, noisy, _, denoised = load_file(tmp_path / "frames")["shown"]
        torch.testing.assert_close(clean, torch.from_numpy(detailed[4]) / 255)
        assert (noisy - clean).std() == pytest.approx(0.1, rel=0.1)
        assert (clean - denoised).std() < 0.09


@pytest.mark.parametrize(("name", "sequence"), [("dust", "time"), ("vit", "space")])
def test_every_number_is_that_of_its_definition(tiny_config: Config, tmp_path: Path, name: str, sequence: Any) -> None:
    # Long enough for two test windows, of frames that are no multiple of anything but the patch.
    np.save(tmp_path / "longer.npy", scrolling_clip(130, 24, 40))
    config = tiny_config(source=str(tmp_path / "longer.npy"), reference=2.0, model=name, width=8)
    torch.manual_seed(0)
    model: Any = build_network(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    data = load_data(config)
    baselines = {"baseline_rmse": baseline_errors(RunFolder(tmp_path / "run"), data, config, torch.device("cpu"))}
    found = judged(measure(model, data, config) | baselines, config, build_constraints(config, model.layers))
    assert len(data.test) == 2
    assert found["test_windows"] == [list(data.test.name(index)) for index in range(2)]
    assert found["sigma"] == data.sigma
    losses, ratios = [], []
    for level, gamma in enumerate([0.15, 0.5]):
        squares = torch.zeros(4, dtype=torch.float64)
        for index in range(2):
            clean = data.test.batch([index]).float() / 255
            noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(20_260_117 + index))
            noisy = clean + gamma * data.sigma * noise
            with torch.no_grad():
                depths = model.reconstructions(to_patches(noisy, 8, sequence))
            outputs = [from_patches(depth, tuple(clean.shape), 8, sequence) for depth in depths]
            squares += torch.tensor([(output - clean).double().square().sum() for output in [*outputs, noisy]])
            if gamma == config.data.gamma:
                target = to_patches(clean, 8, sequence)
                samples = torch.stack([(depth - target).double().square().sum(-1).mean(-1) for depth in depths])
                # A vit's are means over the pixels of a patch.
                losses.append(samples if name == "dust" else samples / 64)
                ratios.append((samples[1:] / samples[:-1]).flatten())
        expected = (255 * (squares / (2 * 5 * 32 * 32)).sqrt()).tolist()
        assert found["depth_rmse"][level] == pytest.approx(expected[:3], rel=1e-5)
        assert found["rmse"][level] == found["depth_rmse"][level][2]
        assert found["baseline_rmse"]["identity"][level] == pytest.approx(expected[3], rel=1e-6)
    mean = torch.cat(losses, dim=1).mean(1)
    assert found["layer_loss"] == pytest.approx(mean.tolist(), rel=1e-5)
    assert found["layer_ratio"] == pytest.approx((mean[1:] / mean[:-1]).tolist(), rel=1e-5)
    assert found["violation"][0] == pytest.approx(mean[0].item() - 2.0, rel=1e-5)
    assert found["violation"][1:] == pytest.approx((mean[1:] - 0.7 * mean[:-1]).tolist(), rel=1e-4, abs=1e-6)
    assert found["feasible"] == all(number <= 0 for number in found["violation"])
    every = torch.cat(ratios)
    assert found["per_sample"]["mean_ratio"] == pytest.approx(every.mean().item(), rel=1e-5)
    assert found["per_sample"]["median_ratio"] == pytest.approx(every.quantile(0.5).item(), rel=1e-5)
    assert found["per_sample"]["descending_fraction"] == (every < 1).double().mean().item()
    assert found["mean_rmse"] == sum(found["rmse"]) / 2
    assert mean_rmse(model, data.test, config, data.sigma, None) == pytest.approx(found["mean_rmse"], rel=1e-6)
    assert found["parameters"] == sum(map(torch.numel, model.parameters()))


def test_the_final_model_is_judged_as_in_its_training(trained: Any) -> None:
    run, config = open_run(trained.constrained)
    again = evaluate_run(run, config)
    assert again.evaluation.model_dump(mode="json") == read_json(run.evaluation)
    data = load_data(config)
    model = DUST.from_pretrained(run.model)
    best = min(
        (entry for entry in run.read_metrics() if "validation" in entry),
        key=lambda entry: (not entry["validation"]["feasible"], entry["validation"]["loss"][-1]),
    )
    found = losses_of_samples(model, data.validation, config, data.sigma).mean(1)
    assert found.tolist() == best["validation"]["loss"]


def test_the_baseline_is_a_hard_threshold_of_the_transform() -> None:
    torch.manual_seed(0)
    frames = torch.rand(2, 3, 16, 24)
    space, time = cosine_transform(8).float(), cosine_transform(3).float()
    torch.testing.assert_close(space @ space.T, torch.eye(8), rtol=0, atol=1e-6)
    torch.testing.assert_close(time[0], torch.full((3,), 3**-0.5))
    found = dct3d_denoise(frames, 0.1, 8)
    coefficients = torch.einsum("st,tfg->sfg", time, space @ frames[1, :, 8:16, 16:24] @ space.T)
    kept = coefficients.abs() >= THRESHOLD_FACTOR * 0.1
    kept[:, 0, 0] = True
    assert 0 < kept.double().mean() < 1
    expected = space.T @ torch.einsum("st,sfg->tfg", time, coefficients * kept) @ space
    torch.testing.assert_close(found[1, :, 8:16, 16:24], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(dct3d_denoise(frames, 0.0, 8), frames, rtol=0, atol=1e-5)
