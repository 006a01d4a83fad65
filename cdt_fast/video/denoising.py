"""A whole video through a trained model: same size, same frame times, same sound, window by window."""

import os
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d, interpolate

from cdt_fast.checks import InputError, check_integer, check_number, printable
from cdt_fast.files import replaced_atomically
from cdt_fast.models import DenoisingViT
from cdt_fast.ops.products import cpu_has_bf16_products
from cdt_fast.progress import progress_bar
from cdt_fast.tasks import open_run
from cdt_fast.training.execution import disable_malloc_trim
from cdt_fast.video.data import open_source
from cdt_fast.video.data.crops import from_opponent, to_opponent
from cdt_fast.video.data.source import Excerpt, FrameArray
from cdt_fast.video.networks import SHIPPED, Denoiser, device_of, load_network, reconstructed
from cdt_fast.video.noise import LEVELS, LITTLE_NOISE, WHITE, Noise, estimated_noise, finest_noise, unclipped
from cdt_fast.video.settings import VideoSettings
from cdt_fast.video.task import doubts
from cdt_fast.video.writing import check_target, write_video

# Noise estimated of a plane, as a share of that at half its size: twice of white noise, nothing of repeated pixels.
_ENLARGED = 0.1
_PIXELS_AT_ONCE = 2**24  # of the frames of a window, for which the layers take 2 GiB
_CUT, _TIMES = 0.04, 2.0  # a cut changes the picture by so much of its range, and so many times the changes beside it
_LONGER = 1.5  # windows than in training: .13 dB better, and fewer of them; twice as long they lose where much moves


@dataclass
class Denoising:
    """A model that denoises video, and its options."""

    model: Denoiser
    settings: VideoSettings  # of the model's run
    depth: int  # number of layers to run
    # Standard deviation of the noise in gray levels, of a noise-adaptive model alone; None: estimated, each plane of a
    # window on its own, as its blur always is.
    sigma: float | None = None
    found: list[float] = field(default_factory=list)  # in brightness where there are colors, in gray levels

    def frames(self, frames: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the denoised frames, uint8 `[h, w, channels]`, one for each of `frames`."""
        for frame in self.exact(frames):
            yield (frame * LEVELS).round_().clamp_(0, 255).to(torch.uint8).cpu().numpy()

    def exact(self, frames: Iterable[np.ndarray]) -> Iterator[Tensor]:
        """Yield what `frames` rounds, in [0, 1]. A window across a cut leaves a ghost of one scene in the other."""
        for _, scene in groupby(_with_scene(frames), itemgetter(0)):
            yield from self._joined(frame for _, frame in scene)

    def _joined(self, frames: Iterable[np.ndarray]) -> Iterator[Tensor]:
        """Yield what `_window` makes of windows of a scene, of frames in two of them a mixture."""
        size, trained = self.settings.data.patch_frames, self.settings.data.window
        # Of crops two windows share frames, as these are best in the middle of one.
        length, shared = (int(_LONGER * trained) // size * size, size // 2) if self.settings.crops else (trained, 0)
        rest = iter(frames)
        begin = list(islice(rest, 2 * length - shared))
        count = len(begin)  # short clips have short windows, or two as long as each other
        halves = max(trained, -(-(count + shared) // (2 * size)) * size)
        length = min(length, halves if count > length else count // size * size)
        if not length:  # repeated until they fill a patch
            yield from self._window(np.stack((begin * size)[:size]), size / len(begin))[: len(begin)]
            return
        held: list[np.ndarray] = []  # from the first frame of a window on
        before: list[np.ndarray] = []
        former: list[Tensor] = []  # what the window before made of the first ones of `held`
        shares = [number / (shared + 1) for number in range(1, shared + 1)]

        def mixed(result: Tensor) -> list[Tensor]:
            both = zip(former, result, shares, strict=False)
            return [*(torch.lerp(*each) for each in both), *result[len(former) :]]

        for frame in chain(begin, rest):
            held.append(frame)
            if len(held) == length:
                result = mixed(self._window(np.stack(held)))
                yield from result[: length - shared]
                before, held, former = held, held[length - shared :], result[length - shared :]
        if len(held) == len(former):
            yield from former
        else:  # filled up with frames from before, so that the rest too has the context the model was trained with
            end, fill = length - shared, max(min(length, trained) - len(held), -len(held) % size)
            yield from mixed(self._window(np.stack([*before[end - fill : end], *held]))[fill:])

    def _window(self, frames: np.ndarray, copies: float = 1.0) -> Tensor:
        """Denoise a window, in which so many frames are the same one, with the same noise; `[T, h, w, channels]`."""
        channels = frames.shape[-1]
        if all((frame == frame[..., :1]).all() for frame in frames):
            # A gray video in a file of colors is one plane: brightness of three would have its noise √3 times.
            frames = frames[..., :1]
        given = torch.from_numpy(frames).to(device_of(self.model)).permute(3, 0, 1, 2).to(torch.float32) / LEVELS
        # A plane at a time: at full size the codes of one are large enough.
        if not self.settings.crops:
            result = torch.cat([self.plane(plane, 1.0, Noise(0.0, WHITE)) for plane in given.unsqueeze(1)])
        else:
            colored = len(given) == 3
            brightness, *colors = (to_opponent(given) if colored else given).unsqueeze(1)
            noise = estimated_noise(brightness, None if self.sigma is None else self.sigma / LEVELS)
            self.found.append(noise.deviation * LEVELS)
            result = torch.cat([self.plane(brightness, copies, noise), *(self._color(each, copies) for each in colors)])
            result = from_opponent(result) if colored else result
            if self.depth > 0:
                result = torch.stack([unclipped(*each) for each in zip(result, given, strict=True)])
        return result.expand(channels, -1, -1, -1).permute(1, 2, 3, 0)

    def _color(self, plane: Tensor, copies: float) -> Tensor:
        """Denoise a difference of colors `[1, T, h, w]`: at half its size where a file has no more, as most.
        Few grids cost .02 dB of the whole frame."""
        half = avg_pool2d(plane, 2, ceil_mode=True)
        whole = finest_noise(plane) > _ENLARGED * finest_noise(half)
        part = plane if whole else half
        # Frames repeated in turns go back as noise does.
        found = estimated_noise(part, coded=not whole and copies == 1)
        deviation = found.deviation if self.sigma is None else min(found.deviation, self.sigma / LEVELS)
        shown = self.plane(part, copies, Noise(deviation, found.blur), few_grids=True)
        return shown if whole else plane + interpolate(shown - half, plane.shape[-2:])

    @torch.no_grad()
    def plane(self, frames: Tensor, copies: float, noise: Noise, *, few_grids: bool = False) -> Tensor:
        """Denoise a plane `[1, T, h, w]` of a window with this noise, of which a network for crops is told."""
        data, (strength, blur) = self.settings.data, noise
        # In the codes that the same noise adds up in, its deviation grows with the root of their number.
        deviation = frames.new_full((1,), copies**0.5 * strength)
        if isinstance(self.model, DenoisingViT) and any(
            -(-length // data.patch) * data.patch != data.size for length in frames.shape[-2:]
        ):
            size = f"{frames.shape[-1]}x{frames.shape[-2]}"
            raise InputError(f"a vit denoises frames as it was trained on, {data.size}x{data.size}, got {size}")
        # Narrow products move no level's PSNR by more than a hundredth of a dB.
        narrow = torch.float16 if frames.is_cuda else torch.bfloat16
        enabled = frames.is_cuda or (self.settings.crops and cpu_has_bf16_products())
        # Of large frames a band of rows at a time, with as much around it as the layers see, a patch less a pixel each.
        around, most = self.depth * data.patch, _PIXELS_AT_ONCE // frames[..., 0, :].numel() // data.patch * data.patch
        rows, shown = max(data.patch, most) if self.settings.crops else frames.shape[-2], []
        with torch.autocast(frames.device.type, narrow, enabled=enabled):
            for start in range(0, frames.shape[-2], rows):
                first = max(0, start - around)
                band = frames[..., first : start + rows + around, :]
                depths = reconstructed(self.model, self.settings, band, deviation, self.depth, True, few_grids, blur)
                shown.append(depths[-1][..., start - first : start - first + rows, :])
        return torch.cat(shown, -2)


def _with_scene(frames: Iterable[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of the scene with each frame. A cut changes areas, in which noise averages out, far more than
    a dozen frames before and after it do: not so a flash, fast motion, or motion with each frame repeated."""
    scene, near = 0, 12
    areas: Tensor | None = None
    held, changes = deque[np.ndarray](), deque([0.0] * (2 * near + 1), 2 * near + 1)
    for number, frame in enumerate(chain(frames, [None] * near)):
        former, areas = areas, None
        if frame is not None:
            held.append(frame)
            green = frame[..., frame.shape[-1] // 2].astype(np.float32)
            rows, columns = (min(16, -(-side // 8)) for side in green.shape)
            areas = adaptive_avg_pool2d(torch.from_numpy(green)[None], (rows, columns)) / LEVELS
        changes.append(0.0 if former is None or areas is None else (areas - former).abs().mean().item())
        if number >= near:
            *_, second, first = sorted(changes)
            scene += changes[near] == first > max(_CUT, _TIMES * second)
            yield scene, held.popleft()


def open_denoiser(run: str | os.PathLike[str] | None) -> tuple[Denoiser, VideoSettings, str]:
    """Return the network of a run, or the one that comes with the package, its settings, and doubts about it."""
    if run is None:
        return load_network(SHIPPED), VideoSettings(), ""
    folder, settings = open_run(run)
    if settings.task != "video":
        raise InputError(f"{run}: is a run of `train {settings.task}`; only runs on video denoise")
    doubted = doubts(folder, settings)
    return load_network(folder.model, settings.training.device), settings, doubted and f"{run}: {doubted}"


def denoise(
    video: str | os.PathLike[str] | np.ndarray,
    run: str | os.PathLike[str] | None = None,
    sigma: float | None = None,
) -> np.ndarray:
    """Return the denoised frames of a video: uint8, gray `[frames, h, w]` or in color `[frames, h, w, 3]`.

    Args:
        video: a video file, a folder of frames or a .npy file; or frames of these shapes, uint8 or floats in [0, 1].
        run: the run folder of a denoiser; None: the network that comes with the package.
        sigma: the noise's standard deviation, of each color by itself, in gray levels of 0..255; None: estimated,
            window by window.

    Raises:
        InputError: the video or the run cannot be read, or `sigma` is not a noise level.
    """
    model, settings, caution = open_denoiser(run)
    if caution:
        warnings.warn(caution, stacklevel=2)
    if not isinstance(video, str | os.PathLike | np.ndarray):
        raise InputError(f"video must be a path or a NumPy array of frames, got a {type(video).__name__}")
    source = FrameArray(Path("video"), video) if isinstance(video, np.ndarray) else open_source(video)
    ranks = set()

    def given(frame: np.ndarray) -> np.ndarray:
        ranks.add(frame.ndim)
        return colored(frame)

    frames = np.stack(list(_checked(model, settings, sigma=sigma).frames(map(given, source.frames()))))
    for note in source.notes:
        warnings.warn(note, stacklevel=2)
    return frames if 3 in ranks else frames[..., 0]


def colored(frame: np.ndarray) -> np.ndarray:
    """Return a frame `[h, w, 3]`: a clip may change from gray to color."""
    return np.broadcast_to(np.atleast_3d(frame), (*frame.shape[:2], 3))


def _checked(
    model: Denoiser, settings: VideoSettings, depth: int | None = None, sigma: float | None = None
) -> Denoising:
    """Return a `Denoising`, or InputError: an option is not valid for the network."""
    depth = model.layers if depth is None else check_integer("depth", depth, 0, model.layers)
    if sigma is not None and not settings.crops:
        raise InputError(f"sigma is {sigma}, and a network of whole frames takes the noise as it comes")
    if sigma is not None:
        expected = "the noise's standard deviation in gray levels, above 0 and at most 255"
        check_number("sigma", sigma, expected, lambda level: 0 < level <= 255)
    return Denoising(model, settings, depth, sigma)


def denoise_video(
    model: Denoiser,
    settings: VideoSettings,
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    part: tuple[int, int] | None = None,
    overwrite: bool = False,
    caution: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Denoise `source` and write a playable video of the same size, upright, with the same frame times and sound.

    The planes of color are denoised each on their own: brightness and two differences of colors where the model was
    trained on crops, else red, green and blue.

    Args:
        model, settings: as in `Denoising`.
        source: a video file, a folder of frames or an array file.
        target: the video file to write; its suffix is one of `writing.CONTAINERS`.
        part: the first frame and the one after the last, without sound; None: all of the video.
        overwrite: replace `target` if it exists.
        caution: a line that is printed on stderr before anything is written.
        options: `depth`, the number of layers (None: all), and `sigma`, as in `Denoising`.

    Returns:
        What was written, the `sigma` that was given or found (the median), and `notes` of what is wrong or lost.

    Raises:
        InputError: the source cannot be read, or the target exists or cannot be written as video.
    """
    disable_malloc_trim()
    denoising = _checked(model, settings, **options)
    frames, target = open_source(source), Path(target)
    if part is not None:
        frames = Excerpt(frames, *part)
    check_target(target, Path(source), overwrite)
    if caution:
        print(printable(f"cdt-fast: note: {caution}"), file=sys.stderr)
    label = f"denoise {frames.path.name}"
    shown = progress_bar(map(colored, frames.frames()), desc=label, unit="frame", total=frames.expected)
    with replaced_atomically(target) as temporary:
        written, notes = write_video(temporary, target, denoising.frames(shown), frames)
        if not overwrite:  # another process may have written it
            check_target(target, Path(source), overwrite)
    found = float(np.median(denoising.found)) if denoising.found else None
    least, greatest = settings.noise
    if denoising.depth == 0 and settings.crops:
        notes.append("no layer was run and nothing removed: depth 0 is the input")
    elif found is not None and denoising.sigma is None and found <= LITTLE_NOISE:
        notes.append(f"hardly any noise was found (sigma {found:.2g}) and removed; give --sigma to remove more")
    elif found is not None and settings.crops and not least <= found <= greatest:
        trained = f"what the model was trained on, {least:g} to {greatest:g}"
        notes.append(f"the noise, sigma {found:.3g}, is beyond {trained}")
    notes = [*frames.notes, *notes]
    return {**written, "depth": denoising.depth, "layers": model.layers, "sigma": found, "notes": notes}
