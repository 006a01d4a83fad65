"""The unrolled transformer (UT) of Yang et al., for video."""

from __future__ import annotations

from collections.abc import Sequence

from cdt_fast.models.dust import DUST


class VideoUT(DUST):
    """UT for sequences of image patches: DUST's layer with ReLU in place of the shrinkage, so without a threshold.

    Arguments, attributes and methods are those of `DUST`, less `sparsity` and `nonlinearity`.
    """

    def __init__(
        self,
        patch_size: int = 256,
        code_size: int = 1024,
        layers: int = 5,
        *,
        tied: bool = False,
        step: float | Sequence[float] | None = None,
        scale: float = 1.0,
        initial_codes: str = "analysis",
        readout: str = "own",
        patch_frames: int = 1,
        noise_adaptive: bool = False,
        tight_frame: bool | None = None,
    ) -> None:
        super().__init__(
            patch_size,
            code_size,
            layers,
            tied=tied,
            sparsity=0.0,
            step=step,
            scale=scale,
            nonlinearity="relu",
            initial_codes=initial_codes,
            readout=readout,
            patch_frames=patch_frames,
            noise_adaptive=noise_adaptive,
            tight_frame=tight_frame,
        )

    @property
    def config(self) -> dict[str, object]:  # type: ignore[override]
        """The constructor's arguments, with the step as computed."""
        return {name: value for name, value in super().config.items() if name not in ("sparsity", "nonlinearity")}
