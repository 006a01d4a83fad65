"""The settings of `train video`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cdt_fast.checks import InputError
from cdt_fast.constraints.presets import PRESETS, ObjectiveName
from cdt_fast.training import settings as shared
from cdt_fast.training.settings import NonNegative, Positive, Section, setting

# What noise levels are multiples of, and the least and the greatest that can be meant.
_UNITS = {"crops": "gray levels of 0..255", "resized": "standard deviations of the training frames"}
_MEANT = {"crops": (0.5, 255.0), "resized": (0.0, 5.0)}


class VideoDataSettings(Section):
    """[data]: which frames, and how they become sequences of patches."""

    source: str | None = setting(None, "video file, frame folder, .npy or a tree of them, or demo, a generated clip")
    frames: Literal["crops", "resized"] = setting(
        "crops",
        "train on crops at full resolution, gray and colors, with noise in gray levels and the mean over shifted grids "
        "of patches; or as in the paper on whole frames made square, with noise in standard deviations of them",
    )
    window: Positive = setting(16, "T, frames per window")
    size: Positive = setting(64, "side in pixels of the frames that a network trains on, a multiple of patch")
    patch: Positive = setting(8, "side in pixels of a square patch")
    patch_frames: Positive = setting(4, "crops: frames of a patch, of which window is a multiple")
    gamma: shared.NoiseLevels = setting([2.0, 50.0], "training noise: one level, or LOW,HIGH of a range")


class VideoModelSettings(Section):
    """[model]: the network."""

    model: Literal["dust", "ut", "vit"] = setting("dust", "network")
    layers: Positive = setting(3, "L")
    code_size: Positive | None = setting(None, "dust, ut: m, atoms of a dictionary (default: pixels of a patch)")
    tied: bool | None = setting(
        None, "dust, ut on whole frames: one dictionary for all layers (default: only when unconstrained)"
    )
    sparsity: NonNegative = setting(0.2, "dust on whole frames: lambda_1; the threshold is lambda_1 / c")
    scale: float = setting(0.02, "dust, ut on whole frames: beta, factor of the attention scores")
    scratch: bool = setting(
        False, "crops: start from cosines, not from the weights that denoise uses without a run, where these fit"
    )
    pretrained: str | None = setting(None, "vit: folder of a transformers ViT to start from (default: random weights)")
    width: Annotated[Positive, Field(ge=2)] = setting(192, "vit: d; heads are 64 wide")


class VideoTrainingSettings(shared.TrainingSettings):
    """[training] of video."""

    steps: Positive = setting(1500, "optimizer steps")
    batch: Positive = setting(1, "windows per micro-batch")
    lr: NonNegative | None = setting(
        None,
        "learning rate of Adam (default: 0.001; 0.01 for a new network on crops, whose dictionaries have .03 of it)",
    )


# The preset, but for the objective, which is another one without constraints. The constraints are on from the start: an
# epoch has thousands of crops, and the first layer does not begin from nothing.
_DENOISER = {**{name: value for name, value in PRESETS["video"].items() if name != "objective"}, "warmup_epochs": 0}


class VideoSettings(shared.RunSettings):
    """All settings of a run on video."""

    task: ClassVar[str] = "video"
    networks: ClassVar[tuple[str, ...]] = ("dust", "ut", "vit")
    data: VideoDataSettings = VideoDataSettings()
    model: VideoModelSettings = VideoModelSettings()
    constraints: shared.ConstraintSettings = shared.ConstraintSettings(**_DENOISER)
    training: VideoTrainingSettings = VideoTrainingSettings()
    evaluation: shared.EvaluationSettings = shared.EvaluationSettings(gammas=[5.0, 10.0, 20.0, 30.0, 40.0, 50.0])

    @property
    def objective(self) -> ObjectiveName:
        """As `RunSettings.objective`; a denoiser under constraints minimizes all depths on a relative scale."""
        return "log" if self.constraints.objective is None and self.constrained else super().objective

    @property
    def coefficients(self) -> list[float] | None:
        """As `RunSettings.coefficients`; of a denoiser depth 0, which reads the noisy input, is no exit."""
        last = self.objective == "last" or self.model.pretrained is not None
        return None if last else [0.0] + [1.0] * self.model.layers

    def needs(self) -> list[tuple[bool, str, str]]:
        model, pretrained = self.model.model, self.model.pretrained
        return [
            *super().needs(),
            (pretrained is None, "pretrained is none", "layers width"),
            (model == "dust", "model is dust", "sparsity"),
            (model != "vit", "model is dust or ut", "code_size tied scale"),
            (self.crops, "frames is crops", "scratch"),
            (not self.crops, "frames is resized", "tied scale sparsity"),
            (model == "vit", "model is vit", "pretrained width"),
        ]

    def check(self) -> None:
        """Raise InputError where settings of the data and of the network do not fit each other."""
        self.check_noise()
        data, model = self.data, self.model.model
        if self.crops and model != "dust":
            instead = f"the paper's whole frames are --preset paper-{model}"
            raise InputError(f"[model] model must be dust for [data] frames crops, got {model}; {instead}")
        if not self.crops and data.patch_frames != 1:
            raise InputError(f"[data] patch_frames must be 1 for whole frames, got {data.patch_frames}")
        for length, of in (("window", "patch_frames"), ("size", "patch")):
            given, unit = getattr(data, length), getattr(data, of)
            if given % unit:
                raise InputError(f"[data] {length} must be a multiple of {of} ({unit}), got {given}")

    def check_noise(self) -> None:
        super().check_noise()
        frames, other = self.data.frames, "resized" if self.crops else "crops"
        least, most = _MEANT[frames]
        for name, levels in (("[data] gamma", self.noise), ("[evaluation] gammas", self.evaluation.gammas)):
            if max(levels) > most or 0 < max(levels) < least:
                meant = f"must be {least:g} to {most:g}; with frames {other} it counts in {_UNITS[other]}"
                raise InputError(f"{name} reaches {max(levels):g} {_UNITS[frames]}, and {meant}")
        if self.crops and self.noise[1] == 0:
            raise InputError("[data] gamma is 0, and a network for crops works in units of the noise: give one above 0")

    def grid_places(self, count: int = 8, moved: bool = False) -> list[tuple[int, int, int]]:
        """Return rows, columns and frames by which 8, 6 or 4 grids of a denoiser of crops are moved, half of them by
        half a patch in time: of 4 x 4 every other one, like the squares of one color of a chessboard, nearly as good
        as all sixteen; six of these; or one in each row and column. `moved`: they start between those."""
        side, late = self.data.patch, self.data.patch_frames // 2
        places = [(row, column) for row in range(4) for column in range(row % 2, 4, 2)]
        some = [places[index] for index in (0, 1, 3, 4, 6, 7)]
        places = {8: places, 6: some, 4: [(0, 0), (1, 2), (2, 1), (3, 3)]}[count]
        down, right = (side // 8, 3 * side // 8) if moved else (0, 0)
        return [
            ((side * row // 4 + down) % side, (side * column // 4 + right) % side, column // 2 * late)
            for row, column in places
        ]

    @property
    def crops(self) -> bool:
        """Return whether the network is a denoiser of crops: in units of the noise, on the mean over shifted grids."""
        return self.data.frames == "crops"

    @property
    def sequence(self) -> Literal["time", "space"]:
        """Return the axis that a sequence of tokens runs over."""
        return "space" if self.model.model == "vit" else "time"
