"""The numbers of the kernels: on a GPU; else in Triton's interpreter (`TRITON_INTERPRET=1`), or compiled and emulated
(`--emulate "RTX 3090"`); else skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from cdt_fast import ops
from cdt_fast.ops import common
from cdt_fast.ops.common import CARDS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulate",
        choices=[name for name, card in CARDS.items() if not 100 <= card.capability < 120],  # tcgen05
        help="compile the kernels for this card and emulate it on the CPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    card = config.getoption("--emulate", None)
    if card is not None:
        if common.interpreting():
            raise pytest.UsageError("--emulate compiles the kernels, and TRITON_INTERPRET is set: unset it")
        from .emulator import install

        install(CARDS[card])
    elif common.interpreting():
        from .interpreter import patch_the_language_once

        patch_the_language_once()


@pytest.fixture(autouse=True)
def _kernels_can_run() -> None:
    reason = common.unavailable_reason()
    if reason is not None:
        pytest.skip(f"{reason}; TRITON_INTERPRET=1 or --emulate runs the kernels on the CPU")


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan() -> Iterator[None]:
    """`torch.empty` holds NaN, so that an element which a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    # torch's default; a property of the module's class, which no checker sees.
    assert torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def emulated(request: pytest.FixtureRequest) -> bool:
    """Whether the kernels run compiled, and on the CPU."""
    return request.config.getoption("--emulate", None) is not None


@pytest.fixture
def device(emulated: bool) -> torch.device:
    """Where the kernels run here."""
    return torch.device("cpu" if emulated or common.interpreting() else "cuda")


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    """Every op runs on its kernels or raises; a comparison with plain torch asks for that itself."""
    if common.unavailable_reason() is not None:
        yield
        return
    with ops.use_backend("triton"):
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Of `--numprocesses=auto` on a GPU: workers compile on the processor, and at times hold 9 GiB of the card each."""
    return max(1, min(8, (os.cpu_count() or 1) // 2)) if torch.cuda.is_available() else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`dtype`: the dtypes that the kernels take here; the interpreter cannot multiply bfloat16."""
    if "dtype" in metafunc.fixturenames:
        dtypes = [torch.float32, torch.float16]
        if common.unavailable_reason() is None and not common.interpreting():
            dtypes.append(torch.bfloat16)
        metafunc.parametrize("dtype", dtypes, ids=lambda dtype: str(dtype).removeprefix("torch."))
