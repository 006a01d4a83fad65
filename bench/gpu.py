"""A short bench of the kernels on the GPU at hand, against eager torch and SDPA, in one process.

    python -m cdt_fast.bench.gpu [--out FOLDER] [--repeats N] [--toy]

Forward and backward together. What is compared takes turns, so that a drift of the card's clock cancels in the ratios,
and is timed only after its losses and gradients agree with the formula's. The floor is what the same work would take at
the rates for products and copies that the card reaches in the same run. Writes `FOLDER/<card>.json`.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cdt_fast import ops
from cdt_fast.bench.dust_step import setting
from cdt_fast.bench.written_out import written_out_losses
from cdt_fast.files import write_json
from cdt_fast.ops.attention import symmetric_attention_reference
from cdt_fast.ops.cross_entropy import layerwise_cross_entropy_reference

# A step computes and differentiates; it returns losses or outputs, and every gradient, for the check of agreement.
Step = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Case:
    """One piece of work, done in several ways.

    Attributes:
        name: the work and its shape.
        steps: by name; the first is what the others are compared with.
        flop: products and sums of the cheapest known way, forward and backward.
        moved: bytes of every input and output, once.
    """

    name: str
    steps: dict[str, Step]
    flop: float
    moved: float


def dust_cases(device: torch.device, toy: bool) -> Iterator[Case]:
    """The constrained step of a tied DUST at 32 windows of 100 positions, and the same without constraints."""
    sequences = 4 if toy else 3200
    model, *tensors = setting(20 * sequences)
    model = model.to(device)
    noisy, clean, weights = (tensor.to(device) for tensor in tensors)
    unconstrained = torch.zeros_like(weights)
    unconstrained[-1] = 1.0

    def step(losses: Callable[[], Tensor], w: Tensor = weights) -> Step:
        def one() -> list[Tensor]:
            model.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                found = losses()
            (w * found).sum().backward()
            assert model.dictionary.grad is not None
            return [found.detach(), model.dictionary.grad.clone()]

        return one

    compiled = torch.compile(written_out_losses)
    tokens, n, m, layers = 20 * sequences, 256, 1024, 5
    yield Case(
        f"DUST step, bf16, {sequences} x 20 tokens, n {n}, m {m}, L {layers}, tied",
        {
            "written out": step(lambda: written_out_losses(model, noisy, clean)),
            "written out, torch.compile": step(lambda: compiled(model, noisy, clean)),
            "cdt_fast": step(lambda: model.layer_losses(noisy, clean)[1]),
        },
        # Two products forward and four backward a layer; the first layer starts from the signal, not from codes.
        flop=2.0 * tokens * n * m * (6 * layers - 3),
        moved=2.0 * tokens * (m * 6 + n * 10) * layers,
    )
    yield Case(
        "DUST step, bf16, constrained against unconstrained",
        {
            "unconstrained": step(lambda: model.layer_losses(noisy, clean)[1], unconstrained),
            "constrained": step(lambda: model.layer_losses(noisy, clean)[1]),
        },
        flop=0.0,
        moved=0.0,
    )


def attention_cases(device: torch.device, toy: bool) -> Iterator[Case]:
    """Symmetric attention with tied values, short to long."""
    shapes = (
        [(2, 20, 32)] if toy else [(3200, 20, 256), (512, 64, 256), (256, 512, 64), (64, 1024, 128), (8, 4096, 256)]
    )
    for batch, tokens, width in shapes:
        z = torch.randn(batch, tokens, width, device=device).mul_(width**-0.25).bfloat16().requires_grad_()
        upstream = torch.randn_like(z)

        def step(attend: Callable[[Tensor], Tensor], z: Tensor = z, upstream: Tensor = upstream) -> Step:
            def one() -> list[Tensor]:
                output = attend(z)
                return [output.detach(), *torch.autograd.grad(output, z, upstream)]

            return one

        def sdpa(z: Tensor) -> Tensor:
            heads = z.unsqueeze(1)
            return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, scale=1.0).squeeze(1)

        yield Case(
            f"symmetric attention, bf16, B {batch}, T {tokens}, d {width}",
            {
                "eager": step(symmetric_attention_reference),
                "SDPA": step(sdpa),
                "cdt_fast": step(ops.symmetric_attention),
            },
            flop=2.0 * batch * tokens * tokens * width * 7,
            moved=2.0 * z.numel() * 5,
        )


def cross_entropy_cases(device: torch.device, toy: bool) -> Iterator[Case]:
    """The layerwise cross-entropy at GPT2-small's shape."""
    depths, tokens, width, vocabulary = (3, 64, 32, 100) if toy else (13, 8192, 768, 50257)
    hidden = [torch.randn(tokens, width, device=device).bfloat16().requires_grad_() for _ in range(depths)]
    head = (torch.randn(vocabulary, width, device=device) * width**-0.5).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    weights = torch.linspace(0.5, 1.5, depths, device=device)

    def fused() -> list[Tensor]:
        total, losses = ops.layerwise_cross_entropy(hidden, head, targets, layer_weights=weights)
        return [losses, *torch.autograd.grad(total, [*hidden, head])]

    def eager() -> list[Tensor]:
        gradients = [torch.zeros_like(head)]
        losses = []
        for weight, states in zip(weights, hidden, strict=True):
            loss = layerwise_cross_entropy_reference([states.float()], head.float(), targets)[0]
            grad_states, grad_head = torch.autograd.grad(weight * loss, [states, head])
            gradients[0] = gradients[0] + grad_head
            gradients.append(grad_states)
            losses.append(loss.detach())
        return [torch.stack(losses), *gradients[1:], gradients[0]]

    def per_depth() -> list[Tensor]:
        losses = [torch.nn.functional.cross_entropy(states @ head.mT, targets) for states in hidden]
        total = (weights * torch.stack(losses)).sum()
        return [torch.stack(losses).detach().float(), *torch.autograd.grad(total, [*hidden, head])]

    yield Case(
        f"layerwise cross-entropy, bf16, {depths} depths, N {tokens}, d {width}, V {vocabulary}",
        {"eager, fp32 logits": eager, "eager, a depth at a time": per_depth, "cdt_fast": fused},
        flop=6.0 * depths * tokens * width * vocabulary,
        moved=2.0 * (2 * depths * tokens * width + 3 * vocabulary * width),
    )


SUITES = {"dust": dust_cases, "attention": attention_cases, "cross_entropy": cross_entropy_cases}


def disagreement(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest root mean square difference, relative to that of the expected tensor."""
    return max(
        ((one.float() - other.float()).square().mean().sqrt() / other.float().square().mean().sqrt()).item()
        for one, other in zip(found, expected, strict=True)
    )


def milliseconds(step: Step, device: torch.device) -> float:
    """One run, by the card's own clock; the clock of the processor where there is no card."""
    if device.type != "cuda":
        started = time.perf_counter()
        step()
        return 1000 * (time.perf_counter() - started)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def ceilings(device: torch.device, toy: bool) -> dict[str, float]:
    """FLOP and bytes a second that a bf16 product and a copy reach here."""
    size = 256 if toy else 8192
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    room = torch.empty((2**20 if toy else 2**30) // 2, dtype=torch.bfloat16, device=device)
    other = torch.empty_like(room)
    best = {}
    for name, step, work in (
        ("product FLOP/s", lambda: [left @ right], 2.0 * size**3),
        ("copy B/s", lambda: [other.copy_(room)], 4.0 * room.numel()),
    ):
        best[name] = work / min(milliseconds(step, device) for _ in range(10)) * 1e3
    return best


def measure(case: Case, device: torch.device, repeats: int, rates: dict[str, float]) -> dict[str, Any]:
    """Agreement, times in turns, ratios and peak memory of every way to do a case; an error stands in its place."""
    expected: list[Tensor] | None = None
    figures: dict[str, Any] = {}
    for name, step in case.steps.items():
        try:
            found = step()
        except Exception as error:  # a baseline that cannot do it is a result, too
            figures[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        expected = expected or found
        compared = case.steps.keys() != {"unconstrained", "constrained"}
        difference = disagreement(found, expected) if compared else 0.0
        figures[name] = {"difference": difference}
        if not difference < 0.05:
            figures[name]["error"] = "differs from the formula: not timed"
    timed = {name: case.steps[name] for name, figure in figures.items() if "error" not in figure}
    del expected
    taken: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(repeats + 2):
        for name, step in timed.items():
            spent = milliseconds(step, device)
            if turn >= 2:
                taken[name].append(spent)
    first = next(iter(taken.values()), [])
    floor = 1e3 * max(case.flop / rates["product FLOP/s"], case.moved / rates["copy B/s"])
    for name, step in timed.items():
        figure = figures[name]
        figure["median ms"] = statistics.median(taken[name])
        figure["spread ms"] = [min(taken[name]), max(taken[name])]
        figure["speed-up"] = statistics.median(a / b for a, b in zip(first, taken[name], strict=True))
        if floor:
            figure["share of the floor"] = floor / figure["median ms"]
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            figure["peak MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {"floor ms": floor, "ways": figures}


def run(device: torch.device, repeats: int, toy: bool, suites: Sequence[str] = tuple(SUITES)) -> dict[str, Any]:
    """All cases of the suites, with what they ran on."""
    torch.manual_seed(0)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    rates = ceilings(device, toy)
    result: dict[str, Any] = {"card": name, "torch": torch.__version__, "toy": toy, "ceilings": rates, "cases": {}}
    if device.type == "cuda":
        import triton

        result["triton"] = triton.__version__
    for suite in suites:
        for case in SUITES[suite](device, toy):
            print(case.name, file=sys.stderr, flush=True)
            result["cases"][case.name] = measured = measure(case, device, repeats, rates)
            for way, figure in measured["ways"].items():
                print(f"  {way:28}  {table_row(figure)}", flush=True)
    return result


def table_row(figure: dict[str, Any]) -> str:
    """One way to do a case, in one line."""
    if "error" in figure:
        return str(figure["error"])
    share = f"{100 * figure['share of the floor']:5.1f} % of the floor" if "share of the floor" in figure else ""
    memory = f"{figure['peak MiB']:9.1f} MiB" if "peak MiB" in figure else ""
    return f"{figure['median ms']:9.3f} ms  {figure['speed-up']:6.2f} x  {memory}  {share}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the results (bench/results)")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds (20)")
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=list(SUITES), help="what to run (all)")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, also on a CPU: that it runs, not how fast")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.toy:
        sys.exit("bench.gpu needs an NVIDIA GPU, and torch finds none; --toy runs on the CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = run(device, options.repeats, options.toy, options.suite)
    file = options.out / (re.sub(r"[^A-Za-z0-9]+", "-", result["card"]).strip("-") + ".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, result)
    print(f"written to {file}")


if __name__ == "__main__":
    main()
