"""Scales of the coefficients over the depths, and what a training without constraints refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cdt_fast.constraints.objective import scaled_coefficients
from cdt_fast.errors import InputError
from cdt_fast.training.run_folder import RunFolder
from tests.runs import train


def test_scales_are_those_of_torchtune_and_of_layerskips_paper() -> None:
    """Each normalized; torchtune counts layers from 0, and takes their number plus one."""
    depths = [0, 1, 2, 4, 8]
    expected = {
        "uniform": [1, 1, 1, 1],
        "linear": [1, 2, 4, 8],
        "sum": [1, 3, 10, 36],
        "sqrt": [1, 2**0.5, 2, 8**0.5],
        "inverse": [1, 1 / 2, 1 / 4, 1 / 8],
        "inverse-sqrt": [1, 2**-0.5, 1 / 2, 8**-0.5],
        "layerskip": [0, 1, 0 + 1 + 2 + 3, sum(range(7)) + 7],  # e(l) of layer l = depth - 1, and of the last one
    }
    for scale, values in expected.items():
        for factor in (1.0, 0.25):
            weighed = [0.0, *(factor * value for value in values[:-1]), values[-1]]
            found = scaled_coefficients(scale, depths, factor)  # pyright: ignore[reportArgumentType]
            assert found == pytest.approx([value / sum(weighed) for value in weighed]), scale
    assert scaled_coefficients("linear", [0, 1, 3]) == [0.0, 0.25, 0.75]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"constrained": False, "exit_scale": 0.5}, "a factor of a scale, such as --coefficients linear"),
    ],
)
def test_what_does_not_fit_is_refused(tiny_config: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        train(RunFolder(tmp_path), tiny_config(**changes), progress=False)
