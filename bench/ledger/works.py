"""What the ledger counts: a training step and the inference of the models, and the losses of all depths."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.bench.baselines.cross_entropy import Depths
from cdt_fast.bench.ledger.recording import META
from cdt_fast.bench.suites import cross_entropy
from cdt_fast.bench.suites.trained import TextWork, VideoWork
from cdt_fast.bench.suites.training_step import CONSTRAINED, TrainingStep, fused
from cdt_fast.training import optimizer as training_step
from cdt_fast.training.factory import build_constraints
from cdt_fast.video.denoising import denoised_frames
from cdt_fast.video.losses import ReconstructionLosses
from cdt_fast.video.networks import build_network
from cdt_fast.video.settings import VideoSettings

TOKENS = (8_000, 64_000)
_BF16 = torch.bfloat16


@dataclass(frozen=True)
class Work:
    """A piece of work whose launches are counted.

    Attributes:
        name: model and whether it trains.
        tokens: of the batch.
        prepare: `(captured)` → a function that does it once, on meta tensors; called where they are on a card.
        flop, moved: what its floor is counted from.
    """

    name: str
    tokens: int
    prepare: Callable[[bool], Callable[[], object]]
    flop: float
    moved: float


class _Anyway:
    """In the place of CUDA graphs: the step as it is captured, done at once."""

    def run(self, work: Callable[[], object]) -> object:
        return work()

    capture = run


def works() -> Iterator[Work]:
    """All that the table has."""
    for tokens in TOKENS:
        for work in (
            *(VideoWork(family, tokens // 20) for family in ("DUST", "VideoUT")),
            TextWork(tokens // 250, 250, 768),
        ):
            yield training(work)
            yield inference(work)
    yield from _denoiser()
    for shape in cross_entropy.SHAPES["gpu"]:
        if shape.model != cross_entropy.CLASSIFIER:
            yield from _losses(shape)


def training(work: VideoWork | TextWork) -> Work:
    """Its constrained step, with the optimizer and the multipliers."""
    tokens = work.shape["B"] * work.shape["T"]
    return Work(
        f"{_family(work)}, training", tokens, lambda captured: _step(work, captured), work.flop, work.moved("bfloat16")
    )


def inference(work: VideoWork | TextWork) -> Work:
    """Its last depth, computed without a gradient."""
    tokens, layers = work.shape["B"] * work.shape["T"], work.layers
    if isinstance(work, VideoWork):
        n, m = work.patch, work.code
        small = 2 * layers * n + (layers - 1) * m
        flop = 2.0 * tokens * (2 * layers * n * m + work.window * small + n**2)
        moved = 2.0 * tokens * n + n * m
    else:
        flop = 4.0 * tokens * layers * (work.width**2 + work.tokens * work.width)
        moved = 1.0 * tokens * work.width + 2 * layers * work.width**2
    name = f"{_family(work)}, inference"
    return Work(name, tokens, lambda captured: _inference(work), flop, _BF16.itemsize * moved)


def _family(work: VideoWork | TextWork) -> str:
    return work.family if isinstance(work, VideoWork) else work.title


def _denoiser() -> Iterator[Work]:
    """What `train video` trains by default, a step of it, and what it denoises: a window in full HD."""
    settings = VideoSettings()
    data, layers, grids = settings.data, settings.model.layers, len(settings.grid_places(settings.data.overlap))
    n = data.patch**2 * data.patch_frames
    m = settings.model.code_size or n

    def works_on(name: str, height: int, width: int, prepare: Any, products: int, moved: int, parameters: int) -> Work:
        tokens = grids * settings.training.batch * data.window * height * width // n
        frames = torch.empty(settings.training.batch, data.window, height, width, device=META)
        flop = 2.0 * products * tokens * layers * n * m
        bytes_moved = 1.0 * _BF16.itemsize * tokens * layers * moved + parameters * layers * n * m
        return Work(f"denoiser, {name}", tokens, lambda captured: prepare(settings, frames), flop, bytes_moved)

    # Of a layer two products, and two more for the gradient of each; Adam reads and writes four tensors of float32.
    yield works_on("training", data.size, data.size, _denoiser_step, 6, 7 * n + 3 * m, 28)
    yield works_on("inference", 1088, 1920, _denoised, 2, 2 * n, 2)


def _denoiser_step(settings: VideoSettings, clean: Tensor) -> Callable[[], object]:
    network, noisy = build_network(settings).to(META), torch.empty_like(clean)
    constraints = build_constraints(settings, None, META, network.layers)
    losses = ReconstructionLosses(network, _BF16, settings)
    optimizer = torch.optim.Adam(network.parameters(), settings.training.lr, fused=True)
    step = training_step.TrainingStep(losses, optimizer, torch.zeros(network.layers + 2, device=META), constraints)
    deviation = clean.new_empty(len(clean))

    def run() -> None:
        step.run([(noisy, clean, deviation)], [1], 1, None, constraints.count_step())

    run()  # the optimizer makes its state
    return run


def _denoised(settings: VideoSettings, noisy: Tensor) -> Callable[[], object]:
    network, deviation = build_network(settings).to(META), noisy.new_empty(len(noisy))

    def run() -> object:
        with torch.autocast(META.type, _BF16):
            return denoised_frames(network, settings, noisy, deviation, grids=None)

    return run


def _losses(shape: cross_entropy.Shape) -> Iterator[Work]:
    name, moved = f"cross-entropy, {shape.model}", cross_entropy.moved(shape, _BF16)
    flop = cross_entropy.flop(shape, cross_entropy.KNOWN)
    for kind, options in (("training", {}), ("training, KL", {"inner_kl": 1.0})):
        prepare = functools.partial(_differentiated, shape, options)
        yield Work(f"{name}, {kind}", shape.tokens, prepare, flop, moved)
    yield Work(f"{name}, inference", shape.tokens, lambda captured: _losses_alone(shape), flop / 3, moved / 2)


def _step(work: VideoWork | TextWork, captured: bool) -> Callable[[], object]:
    step = TrainingStep(work, fused, META, CONSTRAINED, autocast=True, graphs=_Anyway() if captured else None)  # type: ignore[arg-type]
    step()  # the optimizer makes its state
    return step


def _inference(work: VideoWork | TextWork) -> Callable[[], object]:
    model, inputs, _ = work.build(META)

    def run() -> object:
        with torch.inference_mode(), torch.autocast(META.type, _BF16):
            return model(inputs)

    return run


def _depths(shape: cross_entropy.Shape) -> Depths:
    hidden = [
        torch.empty(shape.tokens, shape.width, dtype=_BF16, device=META, requires_grad=True)
        for _ in range(shape.depths)
    ]
    head = torch.empty(shape.vocabulary, shape.width, dtype=_BF16, device=META, requires_grad=True)
    targets = torch.empty(shape.tokens, dtype=torch.int64, device=META)
    return Depths(hidden, head, targets, torch.empty(shape.depths, device=META))


def _losses_alone(shape: cross_entropy.Shape) -> Callable[[], object]:
    depths = _depths(shape)

    def run() -> object:
        with torch.no_grad():
            return ops.layerwise_cross_entropy(depths.hidden, depths.head, depths.targets)

    return run


def _differentiated(shape: cross_entropy.Shape, options: Mapping[str, Any], captured: bool) -> Callable[[], object]:
    depths = _depths(shape)

    def run() -> object:
        total, *_ = ops.layerwise_cross_entropy(
            depths.hidden, depths.head, depths.targets, depth_weights=depths.weights, **options
        )
        return torch.autograd.grad(total, [*depths.hidden, depths.head])

    return run
