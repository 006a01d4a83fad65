"""The ledger of launches: counts of one shape by hand, and the time that they predict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cdt_fast import ops
from cdt_fast.bench.ledger import __main__ as ledger
from cdt_fast.bench.ledger.__main__ import document, main
from cdt_fast.bench.ledger.recording import Entry, record
from cdt_fast.bench.ledger.rows import LAUNCH_SECONDS, PROFILES, REDUNDANCY, predicted_seconds, rows_of, seconds
from cdt_fast.bench.ledger.works import Work, works

H100 = PROFILES["H100"]
# The shape counted by hand: 400 sequences of 20 tokens, n 256, m 1024, L 5, tied; three sequences a tile of 64 rows.
# That would be 134 tiles; the 132 multiprocessors hold two each, and all are used.
TOKENS, N, M, TILES, ROWS = 8000, 256, 1024, 264, 64
CODES, SIGNAL, DICTIONARY = 2 * TOKENS * M, 2 * TOKENS * N, 2 * N * M


def work(name: str, tokens: int) -> Work:
    return next(one for one in works() if (one.name, one.tokens) == (name, tokens))


@pytest.fixture(scope="module")
def step() -> list[Entry]:
    return record(lambda: work("DUST, training", TOKENS).prepare(True), H100.spec)


def named(entries: list[Entry], name: str) -> list[Entry]:
    return [entry for entry in entries if entry.name == name]


def test_a_fused_layer_moves_what_was_counted_by_hand(step: list[Entry]) -> None:
    # Codes, signal, projection and target are read, codes and projection written; and an error a tile. The first layer
    # has no codes.
    forward = 2 * CODES + 4 * SIGNAL + DICTIONARY + 4 * TILES
    moved = [entry.traffic for entry in named(step, "unrolled_forward_kernel")]
    assert moved == [forward - CODES, *[forward] * 4]
    # H, dH, H⁺, dH⁺ and dU; X, Z, dZ, the residual, Z⁺, S, dZ⁺ and the whole dZ⁺. No gradient comes to the last layer
    # but that of its loss, and none leaves for codes of the first.
    backward = 5 * CODES + 8 * SIGNAL + DICTIONARY + 4
    moved = [entry.traffic for entry in named(step, "unrolled_backward_kernel")]
    assert moved == [backward - CODES - SIGNAL, *[backward] * 3, backward - 2 * CODES]


def test_a_fused_layer_multiplies_what_was_counted_by_hand(step: list[Entry]) -> None:
    forward = 2 * TILES * ROWS * (ROWS * 2 * N + M * (ROWS + 2 * N))
    without_codes = 2 * TILES * ROWS * M * ROWS
    flop = [entry.flop for entry in named(step, "unrolled_forward_kernel")]
    assert flop == [forward - without_codes, *[forward] * 4]
    backward = 2 * TILES * ROWS * (ROWS * 5 * N + M * (2 * N + 2 * ROWS))
    flop = [entry.flop for entry in named(step, "unrolled_backward_kernel")]
    assert flop == [*[backward] * 4, backward - 2 * without_codes]


@pytest.mark.parametrize(("width", "values"), [(768, None), (64, 768), (512, 128)])
def test_attention_of_wide_tokens_makes_each_product_once_of_narrow_factors(width: int, values: int | None) -> None:
    sequences, tokens = 100, 512

    def prepare() -> Callable[[], object]:
        shapes = [width] if values is None else [width, values]
        leaves = [
            torch.empty(sequences, tokens, n, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in shapes
        ]
        output = torch.empty(sequences, tokens, shapes[-1], dtype=torch.bfloat16, device="meta")
        return lambda: torch.autograd.grad(ops.symmetric_attention(*leaves, scale=0.5), leaves, output)

    products = [entry for entry in record(prepare, H100.spec) if entry.flop]
    assert {entry.dtype for entry in products} == {torch.bfloat16}
    assert not any(entry.blocks for entry in products)
    # Forward the scores and the output; backward the scores, dA, dV, and (dS + dSᵀ) z in one product, of narrow z two.
    of_z = 3 * width + (width if width < 128 else 0)
    assert sum(entry.flop for entry in products) == 2 * sequences * tokens**2 * (of_z + 3 * (values or width))


def test_products_of_a_library_are_those_counted_by_hand(step: list[Entry]) -> None:
    # Forward D Dᵀ and X by it; backward two for the former and one for the latter, as nobody wants the gradient of X,
    # and two for the dictionary in each layer.
    products = [entry for entry in step if entry.flop and not entry.blocks]
    assert len(products) == 2 + 3 + 2 * 5
    assert sum(entry.flop for entry in products) == 2 * (2 * 5) * TOKENS * N * M + (
        2 * (2 * TOKENS * N * N) + 3 * 2 * N * N * M
    )


def test_a_launched_step_is_as_many_kernels_as_it_was() -> None:
    step = record(lambda: work("DUST, training", TOKENS).prepare(False), H100.spec)
    assert len(step) <= 133


def test_a_default_training_multiplies_nothing_in_float32(step: list[Entry]) -> None:
    assert {entry.dtype for entry in step if entry.flop} == {torch.bfloat16}


def test_the_default_denoiser_multiplies_and_thresholds_in_one_kernel_and_attends_to_nothing() -> None:
    step = record(lambda: work("denoiser, training", 512).prepare(True), H100.spec)
    # All eight grids at once: 81 patches of each, 17 beyond the crop.
    layers = named(step, "residual_linear_forward_kernel")
    assert [entry.flop for entry in layers] == [2.0 * 768 * 512 * 512] * 3
    assert not [entry for entry in step if "attention" in entry.name or "packed" in entry.name]
    assert {entry.dtype for entry in step if entry.flop} == {torch.bfloat16}
    assert len(step) <= 262


def test_a_frame_of_full_hd_is_denoised_a_grid_at_a_time() -> None:
    window = record(lambda: work("denoiser, inference", 261_120).prepare(True), H100.spec)
    assert len(named(window, "residual_linear_forward_kernel")) == 3 * 8
    assert not named(window, "stack")


def test_cross_entropy_multiplies_three_times_a_chunk_and_sweeps_its_logits_twice() -> None:
    entries = record(lambda: work("cross-entropy, GPT2-small, training", 8192).prepare(False), H100.spec)
    chunks = named(entries, "cross_entropy_kernel")
    logits = 13 * 8192 * 50257
    assert sum(entry.traffic for entry in chunks) == 3 * 2 * logits + 13 * 8192 * (8 + 3 * 4)
    assert sum(entry.flop for entry in entries if entry.dtype == torch.bfloat16) == 3 * 2 * logits * 768
    # dW is added to in float32 by the product itself, and no chunk has fewer bytes than it has.
    assert len(named(entries, "addmm")) == len(chunks)
    assert all(entry.traffic > 2 * 4 * 50257 * 768 + 4 * 50257 * 768 for entry in named(entries, "addmm"))


def test_the_kl_reads_the_logits_of_the_last_depth_beside_those_of_each_other() -> None:
    entries = record(lambda: work("cross-entropy, GPT2-small, training, KL", 8192).prepare(False), H100.spec)
    chunks = named(entries, "cross_entropy_kernel")
    logits = 8192 * 50257
    assert sum(entry.traffic for entry in chunks) == (3 * 13 + 2 * 12) * 2 * logits + 13 * 8192 * (8 + 3 * 4)
    # And nothing is launched beside what the cross-entropy alone launches, in another order.
    alone = record(lambda: work("cross-entropy, GPT2-small, training", 8192).prepare(False), H100.spec)
    assert sorted(entry.name for entry in entries) == sorted(entry.name for entry in alone)


def test_every_redundancy_is_of_a_kernel_that_the_ledger_meets(step: list[Entry]) -> None:
    assert {name for name, _ in REDUNDANCY} <= {entry.name for entry in step if entry.flop}


def test_a_launch_takes_the_longer_of_its_bytes_and_its_products() -> None:
    assert seconds(Entry("copy", traffic=3 * 10**12), H100) == pytest.approx(1.0)
    product = Entry("mm", traffic=1, flop=798e12, dtype=torch.bfloat16)
    assert seconds(product, H100) == pytest.approx(1.0)
    # One block more than there are multiprocessors: a second wave for it alone.
    waves = Entry("ours", traffic=1, flop=798e12, dtype=torch.bfloat16, blocks=133, warps=8)
    assert seconds(waves, H100) == pytest.approx(2 * 132 / 133)


def test_launched_a_step_takes_no_less_than_the_host(step: list[Entry]) -> None:
    assert predicted_seconds(step, H100, captured=False) == len(step) * LAUNCH_SECONDS
    assert predicted_seconds(step, H100, captured=True) == pytest.approx(sum(seconds(one, H100) for one in step))


def test_the_host_s_time_is_that_of_a_step_whose_kernels_do_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "ROUNDS", 2)
    monkeypatch.setattr(ledger, "STEPS", 1)
    assert main(["--host"]) == 0
    assert float(capsys.readouterr().out.split(" ms")[0]) > 0


@pytest.mark.slow
def test_the_command_writes_rows_of_every_card_and_a_document(tmp_path: Path) -> None:
    places = [str(tmp_path / name) for name in ("rows.json", "ledger.md")]
    assert main(["--json", places[0], "--markdown", places[1], "--work", "DUST, inference"]) == 0
    rows = json.loads(Path(places[0]).read_text())
    assert {(row["card"], row["tokens"], row["captured"]) for row in rows} == {
        (card, tokens, captured) for card in PROFILES for tokens in (8000, 64000) for captured in (True, False)
    }
    assert all(row["share"] == pytest.approx(row["floor_ms"] / row["predicted_ms"]) for row in rows)
    assert Path(places[1]).read_text() == document(rows)
    assert rows[:12] == [*rows_of(work("DUST, inference", 8000))]


def test_an_unknown_work_is_refused_with_the_names_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--work", "BERT"])
    assert "cross-entropy, Llama-8B, training" in capsys.readouterr().err
