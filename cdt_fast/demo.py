"""The demo: what the package is worth, in three minutes and on one page."""

import shlex
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from cdt_fast import experiments, page, tasks
from cdt_fast.bench.document import rows_of
from cdt_fast.bench.measure import measure
from cdt_fast.bench.suites import step
from cdt_fast.checks import InputError, require
from cdt_fast.files import replaced_atomically
from cdt_fast.progress import progress_bar
from cdt_fast.tables import as_text
from cdt_fast.training import evaluation, loop
from cdt_fast.training.report import as_png, loss_over_depth
from cdt_fast.training.run_folder import RunFolder
from cdt_fast.training.task import EvaluatedRun, Table
from cdt_fast.video import comparison, figures
from cdt_fast.video.data import open_source
from cdt_fast.video.data.scenes import demo_clip
from cdt_fast.video.data.source import FrameArray
from cdt_fast.video.denoising import colored, denoise_video, open_denoiser
from cdt_fast.video.noise import LEVELS
from cdt_fast.video.writing import write_video

_FRAMES, _SIDE, _SIGMA = 48, 320, 30.0  # of the clip that is denoised
_STEPS = 400  # of each training


def run(clip: str | None, out: Path) -> None:
    """Denoise a clip, train with and without constraints, and time a step; InputError: the clip cannot be read, or
    `out` holds other files.

    None: a generated scene. `out` is then the folder of the page, of a noisy and a denoised video, and of two runs.
    """
    if out.exists() and any(out.iterdir()) and not (out / "plain-0").exists() and not (out / "demo.html").exists():
        held = "holds other files, or what is left of a demo that was stopped"
        raise InputError(f"{out}: {held}; remove them, or choose another folder with --out")
    require("matplotlib", "report", "the page of the demo")
    command = shlex.join(["cdt-fast", "demo", *filter(None, [clip]), "--out", str(out)])
    parts = [page.paragraph(f"`{command}` makes this page.")]
    for number, part in enumerate((_denoised, _trained, _timed), 1):
        title, table, more = part(clip, out, number)
        heading, _, *rows = as_text(table).splitlines()  # without the rule, to be short
        print(heading, *rows, "", sep="\n", flush=True)
        parts += [page.heading(title), page.table(table), *more]
    page.write_page(out / "demo.html", "cdt_fast: every layer lowers the loss", parts)
    print(f"page: {out / 'demo.html'}")


def _denoised(clip: str | None, out: Path, number: int) -> tuple[str, Table, list[str]]:
    name = clip or "a generated scene"
    source = FrameArray(Path(name), demo_clip(_FRAMES, _SIDE, seed=1)) if clip is None else open_source(clip)
    given = list(islice(source.frames(), _FRAMES))
    frames = np.stack(given if len({frame.ndim for frame in given}) == 1 else list(map(colored, given)))
    print(f"{number} of 3: denoises {name}, half a minute", file=sys.stderr)
    model, settings, _ = open_denoiser(None)
    found = comparison.compare_denoisers(model, settings, [(name, iter(frames), len(frames))], (_SIGMA,), ())
    noise = np.random.default_rng(0).standard_normal(frames.shape)
    noisy = np.rint(frames + _SIGMA * noise).clip(0, LEVELS).astype(np.uint8)
    with replaced_atomically(out / "noisy.mp4") as temporary:
        write_video(temporary, out / "noisy.mp4", map(np.atleast_3d, noisy), FrameArray(Path(name), noisy))
    denoise_video(model, settings, out / "noisy.mp4", out / "denoised.mp4", overwrite=True)
    table = [row[:2] + row[4:] for row in comparison.as_table(found) if " of " not in row[0]]
    table[0][0] += f", {name}"
    words = "The network comes with the package and has not seen the clip"
    words += "; half of its training was other scenes of the same generator" * (clip is None)
    words += f". `noisy.mp4` and `denoised.mp4`, beside this page, are {len(frames)} frames of it before and after "
    words += "`cdt-fast denoise noisy.mp4 denoised.mp4`."
    return f"Denoising {name}", table, [page.paragraph(words), comparison.picture(found)]


def _trained(clip: str | None, out: Path, number: int) -> tuple[str, Table, list[str]]:
    print(f"{number} of 3: trains two networks, about two minutes", file=sys.stderr)
    experiment = experiments.Experiment.load("video").narrowed(["plain", "constrained"], _STEPS, [0])
    runs: list[EvaluatedRun] = []
    data = None
    for one in progress_bar(experiments.plan(experiment, "demo", out), desc="train", unit="network"):
        folder, task, state = RunFolder(one.path), tasks.task_of(one.settings), one.state()
        folder = RunFolder.create(one.path, one.settings) if state == "new" else folder
        data = loop.train(folder, one.settings, task, data, resume=state != "new", progress=False)
        runs.append(replace(evaluation.evaluate_run(folder, one.settings, task, data), name=one.run))
    first = runs[0].evaluation
    index = figures.nearest_level(first)
    table = [["RMSE after the layers", *map(str, range(first.layers + 1)), "bounds hold"]]
    for one, held in zip(runs, ("", "yes" if runs[1].evaluation.feasible else "no"), strict=True):
        table.append([str(one.name), *(f"{error:.1f}" for error in one.evaluation.depth_rmse[index]), held])
    words = "Two networks like the paper's DUST, on a generated scene with noise of one level: trained on the last "
    words += "loss alone, and with the constraint that every layer removes a tenth. Both reach about the same error "
    words += "at the end; only with constraints is every depth a reconstruction, at which one may stop."
    for name, rmse in first.baseline_rmse.items():
        words += f" RMSE by {figures.baseline_label(runs[0], name)}: {rmse[index]:.1f}."
    pictures = [
        ("A held-out frame at every depth", figures.draw_depths),
        ("Held-out loss at every depth; dashed: what the constraints allow", loss_over_depth),
    ]
    shown = [page.picture(as_png(draw(runs)), caption) for caption, draw in pictures]
    return "Training with and without constraints", table, [page.paragraph(words), *shown]


def _timed(clip: str | None, out: Path, number: int) -> tuple[str, Table, list[str]]:
    print(f"{number} of 3: times a training step, a minute", file=sys.stderr)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = list(islice(step.cases(device, "gpu" if device.type == "cuda" else "demo"), 2))  # of both precisions
    found = []
    for case in cases:
        few = tuple(one for one in case.implementations if one.role != "peer" or one.name == "torch.compile")
        found.append(measure(replace(case, implementations=few), device, 3))
    shape = ", ".join(f"{name} {size}" for name, size in cases[0].shape.items())
    table = [[f"training step ({shape})", "time", "x eager", "MiB at the peak"]]
    # On a CPU the baseline of both is that in float32.
    table += rows_of(found[0]) + [row for row in rows_of(found[1]) if not row[0].startswith("eager, float32")]
    words = "Forward, backward, optimizer and multipliers, measured here and now. More cases: `cdt-fast bench --quick`."
    return "The speed of a training step", table, [page.paragraph(words)]
