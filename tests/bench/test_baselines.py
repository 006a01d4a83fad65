"""The baselines: they compute what they are compared on, and what is missing is said in one line."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cdt_fast.bench.baselines import attention, cross_entropy, support
from cdt_fast.bench.baselines.attention import Prepare
from cdt_fast.bench.case import Step, Unavailable

CPU = torch.device("cpu")


def attention_written_out(_: Tensor, lengths: Tensor | None) -> attention.Attend:
    """A sequence at a time, padding cut off."""

    def attend(z: Tensor, values: Tensor | None) -> Tensor:
        values = z if values is None else values
        output = torch.zeros(*values.shape, dtype=values.dtype)
        for sequence in range(len(z)):
            count = z.shape[1] if lengths is None else int(lengths[sequence])
            own = z[sequence, :count]
            weights = torch.exp(own @ own.T)
            output[sequence, :count] = (weights / weights.sum(1, keepdim=True)) @ values[sequence, :count]
        return output

    return attend


def gradients(prepare: Prepare, z: Tensor, values: Tensor | None, lengths: Tensor | None) -> list[Tensor]:
    output = prepare(z, lengths)(z, values)
    upstream = torch.arange(output.numel(), dtype=torch.float64).sin().view_as(output)
    return [output, *torch.autograd.grad(output, [z] if values is None else [z, values], upstream)]


def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention, cross_entropy):
        monkeypatch.setattr(module, "require_gpu", lambda what, device: None)


def packed_by_hand(query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, scale: float = 0.0) -> Tensor:
    """What xformers documents: `[B, T, heads, width]`, and blocks of sequences that follow each other in one."""
    if attn_bias is not None:
        parts = [tensor[0].split(attn_bias.sizes) for tensor in (query, key, value)]
        found = [packed_by_hand(*(part[None] for part in own), scale=scale)[0] for own in zip(*parts, strict=True)]
        return torch.cat(found)[None]
    scores = scale * torch.einsum("bthw,bshw->bhts", query, key)
    return torch.einsum("bhts,bshw->bthw", scores.softmax(-1), value)


def install_xformers(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("xformers.ops")
    vars(package)["memory_efficient_attention"] = packed_by_hand
    bias = ModuleType("xformers.ops.fmha.attn_bias")
    vars(bias)["BlockDiagonalMask"] = SimpleNamespace(from_seqlens=lambda sizes: SimpleNamespace(sizes=sizes))
    for name in ("xformers", "xformers.ops.fmha"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "xformers.ops", package)
    monkeypatch.setitem(sys.modules, "xformers.ops.fmha.attn_bias", bias)


@pytest.mark.parametrize("baseline", ["eager", "SDPA", "xformers"])
@pytest.mark.parametrize("width", [None, 5])
@pytest.mark.parametrize("padded", [False, True])
def test_attention(baseline: str, width: int | None, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    z = torch.randn(3, 6, 4, dtype=torch.float64, requires_grad=True)
    values = None if width is None else torch.randn(3, 6, width, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([6, 1, 4]) if padded else None
    no_gpu_needed(monkeypatch)
    install_xformers(monkeypatch)
    prepare = {"eager": attention.eager, "SDPA": attention.sdpa, "xformers": attention.xformers}[baseline]
    found, expected = (gradients(one, z, values, lengths) for one in (prepare, attention_written_out))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_an_implementation_of_sdpa_that_is_not_there_fails() -> None:
    z = torch.randn(2, 5, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"No (available kernel|viable backend)"):  # there is none on a CPU
        gradients(functools.partial(attention.sdpa, backend="cuDNN"), z, None, None)


def setting() -> cross_entropy.Depths:
    torch.manual_seed(0)
    hidden = [torch.randn(10, 6, requires_grad=True) for _ in range(3)]
    head, targets = torch.randn(17, 6, requires_grad=True), torch.randint(17, (10,))
    return cross_entropy.Depths(hidden, head, targets, torch.tensor([0.5, -0.25, 1.5]))


def losses_written_out(given: cross_entropy.Depths, sample: Tensor | None = None) -> list[Tensor]:
    """In float64, weighted losses of all depths at once."""
    hidden = [states.detach().double().requires_grad_() for states in given.hidden]
    head = given.head.detach().double().requires_grad_()
    losses = []
    for depth, states in enumerate(hidden):
        among = torch.arange(10) if sample is None or depth == 2 else sample
        logits = states[among] @ head.T
        own = logits[torch.arange(len(among)), given.targets[among]]
        losses.append((logits.exp().sum(1).log() - own).sum() / len(among))
    total = sum(weight * loss for weight, loss in zip(given.weights.double(), losses, strict=True))
    assert isinstance(total, Tensor)
    return [torch.stack(losses).detach(), *torch.autograd.grad(total, [*hidden, head])]


def agree(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


def install_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loss:
        def __init__(self, *, reduction: str, accum_dtype: torch.dtype) -> None:
            assert accum_dtype == torch.float32
            self.reduction = reduction

        def __call__(self, lin_weight: Tensor, _input: Tensor, target: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(_input @ lin_weight.T, target, reduction=self.reduction)

    package = ModuleType("liger_kernel.transformers")
    vars(package)["LigerFusedLinearCrossEntropyLoss"] = Loss
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)


def install_cce(monkeypatch: pytest.MonkeyPatch, seen: list[object]) -> None:
    def function(e: Tensor, c: Tensor, targets: Tensor, *, reduction: str, filter_eps: object = "high") -> Tensor:
        seen.append(filter_eps)
        return torch.nn.functional.cross_entropy(e @ c.T, targets, reduction=reduction)

    package = ModuleType("cut_cross_entropy")
    vars(package)["linear_cross_entropy"] = function
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", package)


def loss_of(baseline: str, monkeypatch: pytest.MonkeyPatch) -> cross_entropy.Loss:
    no_gpu_needed(monkeypatch)
    install_liger(monkeypatch)
    install_cce(monkeypatch, [])
    if baseline == "eager":
        return cross_entropy.eager
    try:
        return cross_entropy.PEERS[baseline](CPU, torch.bfloat16)
    except Unavailable as reason:  # an older torch
        pytest.skip(str(reason))


@pytest.mark.parametrize("baseline", ["eager", *cross_entropy.PEERS])
@pytest.mark.parametrize(
    "loop",
    [cross_entropy.a_depth_at_a_time, cross_entropy.all_depths_then_backward, cross_entropy.flattened],
    ids=lambda loop: loop.__name__,
)
def test_cross_entropy(
    baseline: str, loop: Callable[[cross_entropy.Loss, cross_entropy.Depths], Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = setting()
    step = loop(loss_of(baseline, monkeypatch), given)
    for _ in range(2):  # a second step finds what the first has left
        agree(step(), losses_written_out(given))


def test_inner_depths_are_estimated_from_a_sample() -> None:
    given, sample = setting(), torch.tensor([7, 0, 4])
    found = cross_entropy.a_depth_at_a_time(cross_entropy.eager, given, lambda: sample)()
    agree(found, losses_written_out(given, sample))


def test_cce_filters_by_default_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    no_gpu_needed(monkeypatch)
    install_cce(monkeypatch, seen)
    given = setting()
    for filtered in (True, False):
        loss = cross_entropy.cce(CPU, torch.bfloat16, filtered=filtered)
        loss(given.hidden[0], given.head, given.targets, "mean")
    assert seen == ["high", None]
    with pytest.raises(Unavailable, match=r"float16 and bfloat16 alone, not float32"):
        cross_entropy.cce(CPU, torch.float32, filtered=True)


PREPARED: dict[str, Callable[[], object]] = {
    "xformers": lambda: attention.xformers(torch.zeros(1, 2, 3), None),
    "liger_kernel": lambda: cross_entropy.liger(CPU, torch.bfloat16),
    "cut_cross_entropy": lambda: cross_entropy.cce(CPU, torch.bfloat16, filtered=True),
}


@pytest.mark.parametrize("package", PREPARED)
def test_a_missing_gpu_or_package_is_the_reason(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=r"^\w+ needs an NVIDIA GPU$"):
        PREPARED[package]()
    with pytest.raises(Unavailable, match=r"^FlexAttention's backward needs an NVIDIA GPU$"):
        attention.flex(torch.zeros(1, 2, 3), None)
    no_gpu_needed(monkeypatch)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Unavailable, match=rf"^{package}.* cannot be imported: ModuleNotFoundError"):
        PREPARED[package]()


def test_a_package_that_does_not_import_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "built_for_another.py").write_text("raise OSError('undefined symbol\\nand more')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Unavailable, match=r"^built_for_another cannot be imported: OSError: undefined symbol$"):
        support.imported("built_for_another")


def test_a_torch_without_the_function_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    with pytest.raises(Unavailable, match=r"^torch .* has no chunked linear_cross_entropy$"):
        cross_entropy.torch_chunked(CPU, torch.float32)


def test_a_missing_compiler_is_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(Unavailable, match=r"needs a C\+\+ compiler"):
        support.compiled(torch.sin, "default", CPU)


def test_a_run_that_fails_is_the_reason() -> None:
    def fails() -> list[Tensor]:
        raise RuntimeError("\nno kernel for this width\nTriton said: …")

    for first_run in (support.tried, support.first_run):
        with pytest.raises(Unavailable, match=r"^RuntimeError: no kernel for this width$"):
            first_run(fails)
    runs: list[int] = []

    def counts() -> list[Tensor]:
        runs.append(1)
        return []

    support.tried(counts)()
    assert len(runs) == 2


def test_many_shapes_of_one_function_are_all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's own limit is 8: beyond it, it goes on without compiling.
    graphs: list[int] = []

    def backend(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        graphs.append(1)
        return module.forward

    compile_ = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, *, mode, dynamic, fullgraph: compile_(function, backend=backend, dynamic=dynamic),
    )

    def twice(x: Tensor) -> Tensor:
        return 2 * x

    for size in range(1, 12):
        x = torch.ones(size)
        double = support.compiled(twice, "default", CPU)
        step = support.first_run(lambda double=double, x=x: [double(x)])
        assert step()[0].tolist() == [2.0] * size
        assert len(graphs) == size
