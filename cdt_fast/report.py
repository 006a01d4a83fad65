"""Tables and pictures of one run, or of several side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdt_fast.config import RunConfig
from cdt_fast.errors import InputError
from cdt_fast.files import read_json, write_text
from cdt_fast.runs import RunFolder

BASELINE_NAMES = {"dct": "DCT 16x16, hard threshold", "dct3d": "3-D DCT over the window"}


@dataclass(frozen=True)
class EvaluatedRun:
    """A run with its measurements."""

    folder: RunFolder
    config: RunConfig
    evaluation: dict[str, Any]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> EvaluatedRun:
        """Read a run that has been evaluated.

        Raises:
            InputError: it is no run, or has no evaluation.
        """
        folder, config = RunFolder.open(path)
        if not folder.evaluation.exists():
            raise InputError(f"{path}: has not been evaluated; run `cdt-fast evaluate {path}`")
        return cls(folder, config, read_json(folder.evaluation))

    @property
    def label(self) -> str:
        """What the run is, in words."""
        kind = "constrained" if self.evaluation["constrained"] else "unconstrained"
        shape = "tied" if self.evaluation["tied"] else "untied"
        return f"{self.folder.name} ({kind}, {shape})"


def check_comparable(runs: Sequence[EvaluatedRun]) -> None:
    """Require that all runs were measured on the same frames with the same noise.

    Raises:
        InputError: two runs differ; the message says in what.
    """
    first = runs[0]
    for run in runs[1:]:
        for key in ("task", "source", "test_windows", "gamma", "sigma", "training_gamma"):
            if run.evaluation[key] != first.evaluation[key]:
                raise InputError(
                    f"{run.folder.path} and {first.folder.path} were evaluated on different data: {key} is "
                    f"{_short(run.evaluation[key])} and {_short(first.evaluation[key])}"
                )


def error_table(runs: Sequence[EvaluatedRun]) -> list[list[str]]:
    """RMSE a noise level and their mean: identity, baselines without weights, then the runs."""
    reference = runs[0].evaluation
    gammas = reference["gamma"]
    rows = [["RMSE (0..255)", "parameters", *(f"γ {gamma:g}" for gamma in gammas), "mean"]]
    plain = {"identity (the noisy frames)": reference["identity_rmse"]}
    plain.update({BASELINE_NAMES[name]: values for name, values in reference["baseline_rmse"].items()})
    for name, values in plain.items():
        rows.append([name, "0", *(f"{value:.2f}" for value in values), f"{sum(values) / len(values):.2f}"])
    for run in runs:
        values = run.evaluation
        numbers = [*values["rmse"], values["mean_rmse"]]
        rows.append([run.label, f"{values['parameters']:,}", *(f"{value:.2f}" for value in numbers)])
    return rows


def descent_table(runs: Sequence[EvaluatedRun]) -> list[list[str]]:
    """Held-out loss of depth 0, the ratio of each layer, and the verdict."""
    layers = max(run.evaluation["layers"] for run in runs)
    rows = [
        ["held-out descent", "ℓ_0", *(f"ℓ_{n}/ℓ_{n - 1}" for n in range(1, layers + 1)), "ℓ_L", "feasible", "worst"]
    ]
    for run in runs:
        values = run.evaluation
        ratios = [f"{ratio:.3f}" for ratio in values["layer_ratio"]]
        worst = values["report"]["worst_violation"]
        rows.append(
            [
                run.label,
                f"{values['layer_loss'][0]:.3g}",
                *ratios,
                *[""] * (layers - len(ratios)),
                f"{values['layer_loss'][-1]:.3g}",
                "yes" if values["feasible"] else "no",
                "" if worst is None else f"{worst:+.1%} at {values['report']['worst_layer']}",
            ]
        )
    return rows


def sample_table(runs: Sequence[EvaluatedRun]) -> list[list[str]]:
    """Descent of single sequences."""
    rows = [["per sequence and layer", "mean ratio", "median ratio", "descending"]]
    for run in runs:
        values = run.evaluation["per_sample"]
        shares = f"{values['descending_fraction']:.1%}"
        rows.append([run.label, f"{values['mean_ratio']:.3f}", f"{values['median_ratio']:.3f}", shares])
    return rows


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---" + "|---:" * (len(rows[0]) - 1) + "|")
    return "\n".join(lines)


def tables(runs: Sequence[EvaluatedRun]) -> list[list[list[str]]]:
    """All tables of a report, in order."""
    return [error_table(runs), descent_table(runs), sample_table(runs)]


def write_report(folder: str | os.PathLike[str], runs: Sequence[EvaluatedRun], command: str) -> Path:
    """Write `report.md` and its pictures into `folder`.

    Args:
        folder: made if it does not exist.
        runs: at least one.
        command: the command that makes the report again.

    Returns:
        The path of `report.md`.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    from cdt_fast import figures

    folder = Path(folder)
    pictures = figures.write_figures(folder, runs)
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs on {Path(runs[0].evaluation['source']).name}"
    lines = [f"# {title}", "", f"Made by `{command}`.", ""]
    lines += [
        f"Test windows: {len(runs[0].evaluation['test_windows'])} of {runs[0].config.data.window} frames, none of them "
        f"seen in training; training noise γ = {runs[0].evaluation['training_gamma']:g}, "
        f"σ = {runs[0].evaluation['sigma']:.4f}. RMSE on 0..255 over all pixels of a noise level, then the plain mean "
        "over the levels. Losses: squared error summed over the pixels of a patch with values in [0, 1].",
        "",
    ]
    for table in tables(runs):
        lines += [as_markdown(table), ""]
    for run in runs:
        lines += [f"- {run.label}: {run.evaluation['report']['text']} {_spectral(run)}"]
    lines.append("")
    for name, caption in pictures:
        lines += [f"![{caption}]({name})", "", f"*{caption}*", ""]
    path = folder / "report.md"
    write_text(path, "\n".join(lines))
    return path


def _spectral(run: EvaluatedRun) -> str:
    ratios = run.evaluation["spectral_ratio"]
    return f"‖D‖²/c is at most {max(ratios):.3f}{'' if max(ratios) <= 1 else ', above the bound of 1'}."


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
