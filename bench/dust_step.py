"""A constrained DUST training step against the written-out eager model, in one process.

    python -m cdt_fast.bench.dust_step [--json FILE] [--repeats N] [--tokens B·T]

Forward and backward of the weighted per-depth losses. The two take turns, so that a drift of the machine's speed
cancels in the ratios; before any timing, losses and gradient must agree.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cdt_fast.allocator import keep_freed_memory
from cdt_fast.bench.written_out import written_out_step
from cdt_fast.files import write_json
from cdt_fast.models import DUST

WINDOW = 20


def setting(tokens: int, tied: bool = True) -> tuple[DUST, Tensor, Tensor, Tensor]:
    """A model at the reference shape, noisy and clean tokens `[B, T, n]`, and weights as constraints give them."""
    generator = torch.Generator().manual_seed(0)
    model = DUST(patch_size=256, code_size=1024, layers=5, tied=tied)
    # Patches with some structure over time, so that attention and shrinkage have something to do.
    still = torch.rand(tokens // WINDOW, 1, 256, generator=generator)
    clean = still + 0.02 * torch.randn(tokens // WINDOW, WINDOW, 256, generator=generator)
    noisy = clean + 0.05 * torch.randn(clean.shape, generator=generator)
    return model, noisy, clean, torch.tensor([0.1, -0.2, 0.3, 0.1, -0.1, 1.3])


def fused_step(model: DUST, noisy: Tensor, clean: Tensor, weights: Tensor, bf16: bool = False) -> Tensor:
    """Forward (under bf16 autocast if asked) and backward by the package's ops; adds to the parameters' gradients."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        total, per_layer = model.layer_losses(noisy, clean, weights)
    total.backward()
    return per_layer


def check_agreement(model: DUST, noisy: Tensor, clean: Tensor, weights: Tensor) -> float:
    """The largest relative difference of losses and gradients of the two; nothing is timed unless it is rounding."""
    found = []
    for step in (fused_step, written_out_step):
        model.zero_grad()
        losses = step(model, noisy, clean, weights)
        gradient = model.dictionary.grad
        assert gradient is not None
        found.append((losses, gradient.clone()))
    difference = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*found, strict=True))
    if difference > 1e-4:
        raise AssertionError(f"the two steps differ by {difference:.1e}: not timed")
    return difference


def interleaved(steps: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Seconds of each step, taken in turns, after one round that is not counted."""
    seconds: list[list[float]] = [[] for _ in steps]
    for round_number in range(repeats + 1):
        for taken, step in zip(seconds, steps, strict=True):
            started = time.perf_counter()
            step()
            if round_number:
                taken.append(time.perf_counter() - started)
    return seconds


def measure(tokens: int, repeats: int) -> dict[str, Any]:
    """Time both steps, with the allocator as it comes and as the training loop sets it."""
    model, noisy, clean, weights = setting(tokens)
    difference = check_agreement(model, noisy, clean, weights)

    def step(run: Callable[..., Tensor], **options: bool) -> Callable[[], None]:
        def one() -> None:
            model.zero_grad()
            run(model, noisy, clean, weights, **options)

        return one

    steps = {
        "written out, fp32": step(written_out_step),
        "cdt_fast, fp32": step(fused_step),
        "cdt_fast, bf16 autocast": step(fused_step, bf16=True),
    }
    result: dict[str, Any] = {
        "processor": platform.processor() or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "shape": {"tokens": tokens, "T": WINDOW, "n": 256, "m": 1024, "L": 5, "tied": True},
        "difference": difference,
    }
    for name in ("default allocator", "freed memory kept"):
        if name == "freed memory kept" and not keep_freed_memory():
            continue
        seconds = dict(zip(steps, interleaved(list(steps.values()), repeats), strict=True))
        eager = seconds["written out, fp32"]
        result[name] = {
            step_name: {
                "median_seconds": statistics.median(taken),
                "spread_seconds": [min(taken), max(taken)],
                "speed_up": statistics.median(a / b for a, b in zip(eager, taken, strict=True)),
            }
            for step_name, taken in seconds.items()
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8000, help="B·T (8000)")
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds (7)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures as JSON")
    options = parser.parse_args()
    result = measure(options.tokens, options.repeats)
    print(f"{result['processor']}, {result['instructions']}, {result['threads']} threads, torch {result['torch']}")
    print(f"B·T = {options.tokens}, n = 256, m = 1024, L = 5, tied; largest difference {result['difference']:.1e}")
    for name in ("default allocator", "freed memory kept"):
        for step, figures in result.get(name, {}).items():
            low, high = figures["spread_seconds"]
            print(
                f"{name:18}  {step:24}  {figures['median_seconds']:.3f} s ({low:.3f}..{high:.3f})  "
                f"{figures['speed_up']:.2f} x"
            )
    if options.json:
        write_json(options.json, result)


if __name__ == "__main__":
    main()
