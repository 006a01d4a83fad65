"""The tools for GPUs: what they compile without one, and what they count."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from cdt_fast import kernels, ops
from cdt_fast.models import DUST, VideoUT
from cdt_fast.ops import common
from cdt_fast.ops.common import CARDS, GpuSpec

triton = pytest.importorskip("triton")
if common.interpreting():
    pytest.skip("what the interpreter runs cannot be compiled", allow_module_level=True)

import triton.language as tl  # noqa: E402

from cdt_fast.bench.tools import compile_kernels  # noqa: E402
from cdt_fast.bench.tools.compile_kernels import (  # noqa: E402
    Compiled,
    Launch,
    OperatorsOnMeta,
    compiled,
    compiling_for,
    key,
    recording,
    specializations,
)

RTX_3090 = CARDS["RTX 3090"]


@triton.jit
def spilling_kernel(x, output, N: tl.constexpr):
    """Holds more numbers than a thread has registers until their sum is known."""
    offsets = tl.arange(0, N)
    value = tl.load(x + offsets).to(tl.float32)
    tl.store(output + offsets, value - tl.sum(value, 0))


def launches_on(card: GpuSpec, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    with recording(card) as launches:
        compile_kernels.call_ops(dtype)
    return launches


class TestCompileKernels:
    def test_every_kernel_is_reached(self) -> None:
        written = set()
        for module in pkgutil.iter_modules(kernels.__path__):
            functions = vars(importlib.import_module(f"cdt_fast.kernels.{module.name}"))
            written |= {name for name, one in functions.items() if isinstance(one, triton.JITFunction)}
        reached = {one.kernel.__name__ for one in launches_on(RTX_3090)}
        assert reached == {name for name in written if name.endswith("_kernel")}

    def test_nothing_stays_patched(self) -> None:
        launches_on(RTX_3090, torch.float16)
        assert common.unsupported_reason(torch.device("meta"), torch.float32) is not None
        assert triton.JITFunction.run.__module__.startswith("triton")

    @pytest.mark.parametrize("family", [DUST, VideoUT])
    def test_batches_of_any_size_share_their_kernels(self, family: type[DUST]) -> None:
        model = family(256, 1024, 3).to("meta", torch.bfloat16)
        with recording(RTX_3090) as launches:
            # Full batches, one of the validation, a short last one, and a single sequence.
            for sequences in (400, 256, 37, 1):
                signal = torch.empty(sequences, 20, 256, dtype=torch.bfloat16, device="meta")
                model.layer_losses(signal, signal, torch.empty(4, device="meta"))[0].backward()
        counts = Counter(kernel for kernel, _ in {key("RTX 3090", one) for one in launches})
        assert {"unrolled_forward_kernel", "unrolled_backward_kernel"} <= counts.keys()
        assert max(counts.values()) <= 4, counts

    @pytest.mark.parametrize("card", ["RTX 3090", "H200"])
    @pytest.mark.parametrize("kernel", ["residual_linear", "packed_forward"])
    def test_a_kernel_compiles_and_fits(self, kernel: str, card: str) -> None:
        found = [compiled(*one) for one in specializations(card, ["float16"], kernel, True)]
        assert found
        for one in found:
            assert not one.faults(), one
            assert one.registers > 0, one
        narrow = [one for one in found if one.load_bits < 64]  # of 225 pixels, composed on Hopper
        assert len(narrow) <= (kernel == "packed_forward" and card == "H200"), narrow

    @pytest.mark.parametrize("card", ["RTX 3090", "H200", "RTX 5090"])
    @pytest.mark.parametrize("vocabulary", [32_000, 30_522, 50_257, 128_256])
    def test_logits_are_read_and_written_128_bits_at_a_time(self, vocabulary: int, card: str) -> None:
        """Once where a row can be held, also if 16 does not divide the vocabulary."""
        hidden, weight = (torch.empty(n, 64, dtype=torch.bfloat16, device="meta") for n in (512, vocabulary))
        with recording(CARDS[card]) as launches:
            targets = torch.empty(512, dtype=torch.int64, device="meta")
            ops.layerwise_cross_entropy([hidden.requires_grad_()], weight, targets, depth_weights=[1.0])
        (launch,) = launches
        with compiling_for(CARDS[card]):
            kernel = launch.kernel.warmup(grid=(1,), **launch.arguments, **launch.options)
        assert not compiled(card, "bfloat16", launch).spilled
        found = Counter(re.findall(r"(ld|st)\.global(?:\.\w+)*?\.(v4\.b32|b16)", kernel.asm["ptx"]))
        assert found["ld", "b16"] == found["st", "b16"] == 1  # at the target
        assert found["ld", "v4.b32"] >= found["st", "v4.b32"] > 0
        assert (found["ld", "v4.b32"] == found["st", "v4.b32"]) == (vocabulary < 2**15)

    @pytest.mark.parametrize("weights", [None, [1.0, 0.5], torch.ones(2), torch.ones(2, device="meta")])
    @pytest.mark.parametrize("op", ["layerwise_cross_entropy", "layerwise_reconstruction_loss"])
    def test_nothing_is_copied_from_the_host(self, op: str, weights: Any) -> None:
        """Such a copy cannot be captured in a CUDA graph."""
        copied = []

        class Watch(OperatorsOnMeta):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = super().__torch_dispatch__(function, types, args, kwargs)
                tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, torch.Tensor)]
                mixed = {one.device.type for one in tensors} == {"cpu", "meta"}
                copied.extend([function] * (mixed and function.namespace != "cdt_fast"))
                return result

        depths = [torch.empty(512, 64, device="meta", requires_grad=True) for _ in range(2)]
        given = [depths[0].detach()]
        if op == "layerwise_cross_entropy":
            given = [torch.empty(99, 64, device="meta"), torch.empty(512, dtype=torch.int64, device="meta")]
        with recording(RTX_3090, Watch()):
            getattr(ops, op)(depths, *given, depth_weights=weights)[0].backward()
        assert copied == []

    def test_chunks_leave_room_on_the_card(self) -> None:
        hidden, weight = (torch.empty(n, 5120, dtype=torch.bfloat16, device="meta") for n in (32_768, 151_936))
        rows = {}
        for name in ("RTX 3090", "H200"):
            with recording(CARDS[name]) as launches:
                ops.layerwise_cross_entropy([hidden], weight, torch.empty(32_768, dtype=torch.int64, device="meta"))
            rows[name] = max(len(one.arguments["logits"]) for one in launches)
        assert rows["RTX 3090"] * 2 * 151_936 <= CARDS["RTX 3090"].memory / 16
        assert rows["H200"] == 8192  # a quarter of all: at most as many bytes as dW

    def test_a_spill_is_a_fault_in_16_bits(self) -> None:
        x = torch.empty(16_384, device="meta")
        launch = Launch(spilling_kernel, {"x": x, "output": x, "N": 16_384}, {"num_warps": 1})
        found = compiled("RTX 3090", "bfloat16", launch)
        assert found.spilled > 0
        assert found.faults() == [f"spills {found.spilled} bytes a thread"]
        assert not found._replace(mode="TF32").faults()

    def test_tiles_of_two_kinds_at_one_address_are_a_fault(self) -> None:
        """As ptxas 12.8 compiles them wrong: two upper halves of a descriptor are added to one lower half."""
        one, other = "add.s64 \t%rd1, %rd9, 4611686293305294850;", "add.s64 \t%rd2, %rd9, -9223371899415822334;"
        assert compile_kernels.reads_two_kinds(f"{one}\n{other}")
        assert not compile_kernels.reads_two_kinds(f"{one}\n{one.replace('rd1', 'rd3')}")
        assert not compile_kernels.reads_two_kinds(f"{one}\n{other.replace('%rd9', '%rd8')}")
        (fault,) = Compiled("H200", "a", "bfloat16", mixed=True).faults()
        assert "ptxas" in fault

    def test_what_does_not_fit_or_compile_is_a_fault(self) -> None:
        large = Compiled("RTX 3090", "a", "TF32", shared=200_000)
        assert large.faults() == ["needs 200,000 bytes of shared memory, the card has 101,376"]
        assert not large._replace(card="H200").faults()
        assert large._replace(shared=0, error="TypeError: no").faults() == ["does not compile: TypeError: no"]

    def test_the_command_prints_a_table_and_its_status(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        found = [
            Compiled("RTX 3090", "a", "bfloat16", 100, 0, 2048, 128),
            Compiled("RTX 3090", "a", "bfloat16", 90),
            Compiled("H200", "a", "bfloat16", 80, 24, 1025, 64),
            Compiled("H200", "b", "bfloat16", error="no"),
        ]
        document = tmp_path / "gpus.md"
        document.write_text("before\n<!-- compile_kernels -->\nold\n<!-- end -->\nafter\n")
        monkeypatch.setattr(compile_kernels, "DOCUMENT", document)
        monkeypatch.setattr(
            compile_kernels, "specializations", lambda card, *_: [(one,) for one in found if one.card == card]
        )
        monkeypatch.setattr(compile_kernels, "compiled", lambda one: one)
        monkeypatch.setattr(compile_kernels, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
        assert compile_kernels.main(["--card", "RTX 3090", "--write"]) == 0
        assert compile_kernels.main(["--card", "RTX 3090", "H200", "--write"]) == 1
        assert "a, bfloat16, H200: spills 24 bytes a thread" in capsys.readouterr().out
        text = document.read_text()
        assert "| a | 100/2/0 | 80/2/64 **spills 24** |" in text
        assert "| b | – | **1 do not compile** |" in text
        assert text.startswith("before\n<!-- compile_kernels -->\n")
        assert text.endswith("\n<!-- end -->\nafter\n")
