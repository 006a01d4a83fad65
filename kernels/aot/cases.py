"""What is compiled ahead of time: the launchers, called as the ops call them, at every choice that changes the code.

A family is one function from a dtype to its cases, listed in `FAMILIES`. The tensors are on the meta device: they have
shapes and strides and no memory, so the cases stand at the sizes that the kernels are meant for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, get_args

import torch
from torch import Tensor

from cdt_fast.kernels.aot.case import Case
from cdt_fast.kernels.arguments import Nonlinearity
from cdt_fast.kernels.layerwise_cross_entropy import cross_entropy_
from cdt_fast.kernels.layerwise_reconstruction_loss import reconstruction_backward, reconstruction_forward
from cdt_fast.kernels.lista_step import lista_step_backward, lista_step_forward
from cdt_fast.kernels.residual_linear import residual_linear_forward
from cdt_fast.kernels.symmetric_attention_packed import packed_backward, packed_forward
from cdt_fast.kernels.symmetric_attention_streaming import streaming_backward, streaming_forward
from cdt_fast.kernels.unrolled_layer import unrolled_backward, unrolled_forward


def _empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _after(before: dict[str, Any], **needs: bool) -> dict[str, Any]:
    """What the backward of an attention is given, from what its forward was: a streamed output keeps its remainder in
    16 bits."""
    z, like = before["z"], before.get("values", before["z"])
    kept = z if before.get("keeps") and z.element_size() == 2 else z.new_empty(0)
    sums = _empty(torch.float32, *z.shape[:-1])
    after = {"output": like, "grad_output": like, "log_sum_exp": sums, "kept": kept, **needs}
    return {**before, "keeps": False, **after}


def _flagged(z: Tensor, **given: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The flags of an attention of `z` in words, and what is given of its arguments."""
    for tied, padded, energy in itertools.product((False, True), repeat=3):
        flags = {"lengths": _empty(torch.int64, len(z)) if padded else None, "energy": energy}
        values = {} if tied else {"values": z}
        yield ", tied" * tied + ", lengths" * padded + ", energy" * energy, {"z": z, **values, **flags, **given}


def _flagged_backwards(launcher: Callable[..., Any], z: Tensor, **given: Any) -> Iterator[Case]:
    for flags, before in _flagged(z, **given):
        yield Case.of(f"backward{flags}", launcher, _after(before))
        if "values" in before:
            yield Case.of(f"backward of z alone{flags}", launcher, _after(before, needs_values=False))
            yield Case.of(f"backward of the values alone{flags}", launcher, _after(before, needs_z=False))


def packed_attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Short sequences: the reference width, each width class, and every flag."""
    tokens = 20
    for width, value_width in ((256, 256), (64, 64), (250, 250), (256, 1024)):
        before = {"z": _empty(dtype, 3200, tokens, width), "values": _empty(dtype, 3200, tokens, value_width)}
        shape = f"T {tokens}, d {width}, values {value_width} wide"
        yield Case.of(f"forward, {shape}", packed_forward, before, True, width)
        yield Case.of(f"backward, {shape}", packed_backward, _after(before), True, width)
    for longest in (33, 64):
        before = {"z": _empty(dtype, 1000, longest, 64)}
        yield Case.of(f"forward, T {longest}, d 64", packed_forward, before)
        yield Case.of(f"backward, T {longest}, d 64", packed_backward, _after(before))
    z = _empty(dtype, 3200, tokens, 256)
    for flags, before in _flagged(z):
        yield Case.of(f"forward{flags}", packed_forward, before)
    yield from _flagged_backwards(packed_backward, z)


def streaming_attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Long sequences: the widths of every row of the block tables, and every flag."""
    sequences, tokens = 64, 1024
    for width in (64, 128, 256, 200, 16):
        before = {"z": _empty(dtype, sequences, tokens, width), "keeps": True}
        shape = f"T {tokens}, d {width}, tied"
        yield Case.of(f"forward, {shape}", streaming_forward, before, True, width)
        yield Case.of(f"backward, {shape}", streaming_backward, _after(before), True, width)
    z = _empty(dtype, sequences, tokens, 256)
    for flags, before in _flagged(z):
        yield Case.of(f"forward{flags}", streaming_forward, {**before, "keeps": True})
        if flags != ", tied":
            yield Case.of(f"forward without a backward{flags}", streaming_forward, before)
    yield from _flagged_backwards(streaming_backward, z, keeps=True)


def lista_cases(dtype: torch.dtype) -> Iterator[Case]:
    """One kernel for narrow tokens: widths, nonlinearities, what is kept or needed, a transposed dictionary."""
    rows, atoms = 64_000, 1024
    codes = _empty(dtype, rows, atoms)
    for width in (256, 100, 64, 16):
        shared = {"dictionary": _empty(dtype, width, atoms), "step": 0.1}
        before = {"codes": codes, "signal": _empty(dtype, rows, width), "threshold": 0.1, **shared}
        after = {"grad_output": codes, "output": codes, **shared}
        yield Case.of(f"forward, n {width}, m {atoms}", lista_step_forward, before, True, width)
        yield Case.of(f"backward, n {width}, m {atoms}", lista_step_backward, after, True, width)
        if width != 256:
            continue
        for nonlinearity, kept in itertools.product(get_args(Nonlinearity), (True, False)):
            name = f"forward, {nonlinearity}{', residual kept' * kept}"
            flags = {"nonlinearity": nonlinearity, "keep_residual": kept}
            yield Case.of(name, lista_step_forward, before | flags)
        for nonlinearity, needs_codes, needs_update in itertools.product(
            ("soft_threshold", "identity"), (True, False), (True, False)
        ):
            names = ["residual", *itertools.compress(("codes", "update"), (needs_codes, needs_update))]
            needs = {"nonlinearity": nonlinearity, "needs_codes": needs_codes, "needs_dictionary": needs_update}
            yield Case.of(f"backward, {nonlinearity}, of {', '.join(names)}", lista_step_backward, after | needs)
        transposed = {"dictionary": _empty(dtype, atoms, width).t()}
        yield Case.of("forward, transposed dictionary", lista_step_forward, before | transposed)


def residual_linear_cases(dtype: torch.dtype) -> Iterator[Case]:
    """The nonlinearities, weights that are transposed, residuals that are a matrix or a row."""

    def given(rows: int, depth: int, columns: int) -> dict[str, Any]:
        residual = _empty(dtype, rows, columns)
        return {"x": _empty(dtype, rows, depth), "weight": _empty(dtype, depth, columns), "residual": residual}

    for rows, depth, columns in ((64_000, 256, 1024), (16_384, 768, 768), (1000, 130, 70)):
        name = f"{rows} rows, n {depth}, m {columns}"
        yield Case.of(name, residual_linear_forward, given(rows, depth, columns), True, columns)
    square = given(16_384, 768, 768)
    for nonlinearity in ("soft_threshold", "identity"):
        yield Case.of(nonlinearity, residual_linear_forward, square | {"nonlinearity": nonlinearity})
    row = {"weight": square["weight"].t(), "residual": _empty(dtype, 768)}
    yield Case.of("transposed weight, residual a row", residual_linear_forward, square | row)


def cross_entropy_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Chunks of logits of a power of two, of GPT-2's odd vocabulary and of Llama's; the flags at these two.

    With the KL to the last depth too, detached or not, and the gradient alone, which reads what the loss has written.
    """
    for rows, vocabulary in ((1024, 128_256), (2048, 50_257), (2048, 1024), (4096, 10)):
        logits, of_last = (_empty(dtype, rows, vocabulary) for _ in range(2))
        losses, log_sums, log_sums_of_last, scales = (_empty(torch.float32, rows) for _ in range(4))
        targets, classes = (_empty(torch.int64, rows) for _ in range(2))
        every = {"logits": logits, "targets": targets, "log_sums": log_sums}
        loss, gradient = every | {"losses": losses}, every | {"scales": scales, "out": logits}
        kl = {"of_last": of_last}
        beside = kl | {"to_last": _empty(torch.float32, rows, vocabulary)}
        passes = {
            "loss": loss,
            "gradient": gradient,
            "both": loss | gradient,
            "loss, KL": loss | kl,
            "gradient, KL": gradient | kl | {"log_sums_of_last": log_sums_of_last},
            "both, KL": loss | gradient | kl,
            "gradient, KL of both depths": gradient | beside,
            "both, KL of both depths": loss | gradient | beside,
        }
        extremes: list[tuple[float | None, float]] = [(None, 0.0), (30.0, 0.1)]  # of how many values are alive at once
        wanted = [(f"loss and gradient, {rows} rows", passes["both"], extremes[0])]
        if vocabulary > 1024:
            for name, given in passes.items():
                more = [] if "KL" in name else [(None, 0.1), (30.0, 0.0)]
                wanted += [(name, given, options) for options in (*extremes, *more)]
            for name in ("loss", "both", "loss, KL", "both, KL of both depths"):
                wanted.append((f"{name}, arg-max", passes[name] | {"classes": classes}, extremes[1]))
        for number, (name, given, (softcap, smoothing)) in enumerate(wanted):
            flags = ", softcap" * (softcap is not None) + ", smoothing" * (smoothing > 0)
            options = {"ignore_index": -100, "softcap": softcap, "smoothing": smoothing, "share": 0.5}
            yield Case.of(f"{name}, V {vocabulary}{flags}", cross_entropy_, given, not number, vocabulary, **options)


def reconstruction_cases(dtype: torch.dtype) -> Iterator[Case]:
    """All depths in one launch: how many, with padding or without, which gradients are needed."""
    tokens, width = 64_000, 256
    target, padding = _empty(dtype, tokens, width), {"padding": _empty(torch.bool, tokens)}
    for depths in (6, 2, 13):
        factors = _empty(torch.float32, depths)
        before: dict[str, Any] = {"reconstructions": [target] * depths, "target": target}
        after = before | {"grad": factors, "needs_reconstructions": [True] * depths}
        yield Case.of(f"errors of {depths} depths", reconstruction_forward, before, is_size=True)
        name = f"gradients of {depths} depths"
        yield Case.of(name, reconstruction_backward, after, is_size=True, factors=factors)
        if depths != 6:
            continue
        yield Case.of("errors, padding", reconstruction_forward, before | padding)
        for padded, needs_target, alternate in itertools.product((False, True), repeat=3):
            name = "gradients" + " of every other depth" * alternate
            name += ", padding" * padded + ", of the target too" * needs_target
            needs: dict[str, Any] = {"needs_target": needs_target}
            if alternate:
                needs["needs_reconstructions"] = [True, False] * 3
            given = after | needs | (padding if padded else {})
            yield Case.of(name, reconstruction_backward, given, factors=factors)


def unrolled_layer_cases(dtype: torch.dtype) -> Iterator[Case]:
    """The reference layer, tied and with a dictionary a layer, with and without the loss in it, and every flag."""
    if dtype.itemsize > 2:
        return
    sequences, tokens, atoms = 3200, 20, 1024
    codes, lengths = _empty(dtype, sequences, tokens, atoms), _empty(torch.int64, sequences)
    for width in (256, 64, 100):
        signal, dictionary = _empty(dtype, sequences, tokens, width), _empty(dtype, width, atoms)
        layer: dict[str, Any] = {"codes": codes, "signal": signal, "projection": signal, "dictionary": dictionary}
        layer |= {"step": 0.1, "threshold": 0.1}
        upstream: dict[str, Any] = {"grad_next_codes": codes, "grad_next_projection": signal}
        after: dict[str, Any] = {**layer, "next_codes": codes, "next_projection": signal}
        yield Case.of(f"forward, n {width}, m {atoms}", unrolled_forward, layer, True, width)
        yield Case.of(f"backward, n {width}, m {atoms}", unrolled_backward, after | upstream, True, width)
        if width != 256:
            continue
        error = {"grad_error": _empty(torch.float32, 1)}
        loss, padded, untied = {"target": signal}, {"lengths": lengths}, {"next_dictionary": dictionary.clone()}
        changes: dict[str, dict[str, Any]] = {
            "loss": loss,
            "lengths": padded,
            "loss, lengths": loss | padded,
            "dictionary a layer": untied,
            "dictionary a layer, loss": untied | loss,
            "dictionary a layer, lengths": untied | padded,
            "dictionary a layer, loss, lengths": untied | loss | padded,
            **{name: {"nonlinearity": name} for name in ("hard_threshold", "relu", "identity")},
        }
        # The first layer of a network.
        start: dict[str, Any] = {"codes": None}
        starts = after | upstream | start | {"needs_codes": False}
        for name, change in changes.items():
            of_loss = error if "target" in change else {}
            yield Case.of(f"forward, {name}", unrolled_forward, layer | change)
            yield Case.of(f"backward, {name}", unrolled_backward, after | upstream | change | of_loss)
            yield Case.of(f"forward, {name}, without codes", unrolled_forward, layer | start | change)
            given = starts | change | of_loss | {"needs_signal": name == "loss"}
            yield Case.of(f"backward, {name}, without codes", unrolled_backward, given)
        given = starts | loss | error | {"needs_signal": False}
        yield Case.of("backward, loss, of an input, without codes", unrolled_backward, given)
        for name, tensor in (upstream | error).items():
            yield Case.of(f"backward, only {name}", unrolled_backward, after | loss | {name: tensor})
        for needed in itertools.product((True, False), repeat=3):
            needs = dict(zip(("dictionary", "projection", "codes"), needed, strict=True))
            names = ["signal", *(name for name, need in needs.items() if need)]
            given = after | upstream | {f"needs_{name}": need for name, need in needs.items()}
            yield Case.of(f"backward, of {', '.join(names)}", unrolled_backward, given)


# A family, and the function that lists its cases: the first case of a kernel is the one that the tests compile.
FAMILIES: dict[str, Callable[[torch.dtype], Iterator[Case]]] = {
    "symmetric_attention_packed": packed_attention_cases,
    "symmetric_attention_streaming": streaming_attention_cases,
    "unrolled_layer": unrolled_layer_cases,
    "lista_step": lista_cases,
    "residual_linear": residual_linear_cases,
    "layerwise_cross_entropy": cross_entropy_cases,
    "layerwise_reconstruction_loss": reconstruction_cases,
}
