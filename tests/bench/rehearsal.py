"""The triage without a GPU: every process of it emulates the kernels that it launches; nothing else is replaced.

    python tests/bench/rehearsal.py --device cpu --size toy --out DIR

CUDA graphs, which a CPU has none of, call the step anew. REHEARSE_FAILURE and REHEARSE_HANG name a stage that fails or
hangs, REHEARSE_LOSS one whose first process dies in its first part, as it does where the card's memory is corrupted.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from cdt_fast.bench.triage.__main__ import main

COMMAND = (sys.executable, __file__)


def stand_in() -> None:
    """Put the emulator in the place of the card."""
    from cdt_fast.bench.suites import step, training_step
    from cdt_fast.bench.triage import works
    from cdt_fast.kernels.cards import CARDS
    from tests.graph_fakes import EagerGraphs
    from tests.kernels.emulator import install

    install(CARDS[os.environ.get("REHEARSE_CARD", "H200")])
    for module in (step, training_step):
        module.refuse_slow_bf16 = lambda device, autocast: None  # type: ignore[assignment]
    works.graphs_of = lambda device: EagerGraphs()  # type: ignore[assignment]


def misfortune(words: list[str]) -> None:
    """What is asked for by the environment to happen in this stage."""
    stage = words[words.index("--here") + 1]
    if stage == os.environ.get("REHEARSE_FAILURE"):
        raise RuntimeError("made to fail")
    if stage == os.environ.get("REHEARSE_HANG"):
        time.sleep(1e6)
    if stage == os.environ.get("REHEARSE_LOSS") and words[words.index("--skip") + 1] == "0":
        print("part 0: made to die", flush=True)
        os.abort()


if __name__ == "__main__":
    if "--here" in sys.argv:
        misfortune(sys.argv)
        stand_in()
    sys.exit(main(command=COMMAND))
