"""The unrolled transformer (UT) of Yang et al., for video."""

from __future__ import annotations

from typing import Any

from cdt_fast.models.dust import DUST


class VideoUT(DUST):
    """UT for sequences of image patches: DUST's layer with ReLU in place of the shrinkage, so without a threshold.

    Arguments, attributes and methods are those of `DUST`, less `sparsity` and `nonlinearity`.
    """

    def __init__(self, patch_size: int = 256, code_size: int = 1024, layers: int = 5, **options: Any) -> None:
        super().__init__(patch_size, code_size, layers, sparsity=0.0, nonlinearity="relu", **options)

    @property
    def config(self) -> dict[str, object]:  # type: ignore[override]
        """The constructor's arguments, with the step as computed."""
        return {name: value for name, value in super().config.items() if name not in ("sparsity", "nonlinearity")}
