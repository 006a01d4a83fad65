"""What is compiled ahead of time: the launchers, called as the ops call them, at every choice that changes the code.

A family is one function from a dtype to its cases, listed in `FAMILIES`. The tensors are on the meta device: they have
shapes and strides and no memory, so the cases stand at the sizes that the kernels are meant for.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from cdt_fast.kernels import layerwise_cross_entropy as cross_entropy
from cdt_fast.kernels import layerwise_reconstruction_loss as reconstruction
from cdt_fast.kernels import lista_step as lista
from cdt_fast.kernels import residual_linear, unrolled_layer
from cdt_fast.kernels import symmetric_attention_packed as packed_attention
from cdt_fast.kernels import symmetric_attention_streaming as streaming_attention
from cdt_fast.kernels import symmetric_attention_wide as wide_attention
from cdt_fast.kernels.aot.case import Case


def _empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def packed_attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Short sequences: the reference width, each width class, and every flag."""
    tokens = 20
    lengths = _empty(torch.int64, 3200)
    for width, value_width in ((256, 256), (64, 64), (250, 250), (256, 1024)):
        z, values = _empty(dtype, 3200, tokens, width), _empty(dtype, 3200, tokens, value_width)
        shape = f"T {tokens}, d {width}, values {value_width} wide"
        flop = 2 * 3200 * tokens**2 * (width + value_width)
        yield Case(
            f"forward, {shape}",
            functools.partial(packed_attention.packed_forward, z, values, None, 1.0, False),
            (z, values),
            flop,
            aligned=width % 16 == 0,
        )
        yield Case(
            f"backward, {shape}",
            functools.partial(packed_attention.packed_backward, z, values, values, None, 1.0, False),
            (z, values, values),
            2 * flop,
            aligned=width % 16 == 0,
        )
    for longest in (33, 64):
        z = _empty(dtype, 1000, longest, 64)
        yield Case(
            f"forward, T {longest}, d 64", functools.partial(packed_attention.packed_forward, z, z, None, 1.0, False)
        )
        yield Case(
            f"backward, T {longest}, d 64, tied",
            functools.partial(packed_attention.packed_backward, z, None, z, None, 1.0, False),
        )
    z = _empty(dtype, 3200, tokens, 256)
    for padded, energy in itertools.product((False, True), repeat=2):
        flags = ", lengths" * padded + ", energy" * energy
        count = lengths if padded else None
        if flags:
            yield Case(f"forward{flags}", functools.partial(packed_attention.packed_forward, z, z, count, 1.0, energy))
        backward = functools.partial(packed_attention.packed_backward, scale=1.0, lengths=count, energy=energy)
        yield Case(f"backward, tied{flags}", functools.partial(backward, z, None, z))
        if flags:
            yield Case(f"backward{flags}", functools.partial(backward, z, z, z))
        yield Case(f"backward of z alone{flags}", functools.partial(backward, z, z, z, needs_values=False))
        yield Case(f"backward of the values alone{flags}", functools.partial(backward, z, z, z, needs_z=False))


def lista_cases(dtype: torch.dtype) -> Iterator[Case]:
    """One kernel for narrow tokens: widths, nonlinearities, what is kept or wanted, a transposed dictionary."""
    rows, atoms = 64_000, 1024
    for width in (256, 100, 64, 16):
        codes, signal = _empty(dtype, rows, atoms), _empty(dtype, rows, width)
        dictionary = _empty(dtype, width, atoms)
        flop = 4 * rows * width * atoms
        forward = functools.partial(lista.lista_step, codes, signal, step=0.1, threshold=0.1)
        backward = functools.partial(lista.lista_step_backward, codes, codes, dictionary, step=0.1)
        yield Case(
            f"forward, n {width}, m {atoms}",
            functools.partial(forward, dictionary, nonlinearity="soft_threshold", keep_residual=True),
            (codes, signal, dictionary),
            flop,
            aligned=width % 16 == 0,
        )
        yield Case(
            f"backward, n {width}, m {atoms}",
            functools.partial(backward, nonlinearity="soft_threshold", wants_codes=True, wants_update=True),
            (codes, codes, dictionary),
            flop,
            aligned=width % 16 == 0,
        )
        if width != 256:
            continue
        for nonlinearity, kept in itertools.product(("soft_threshold", "relu", "identity"), (True, False)):
            if (nonlinearity, kept) != ("soft_threshold", True):
                yield Case(
                    f"forward, {nonlinearity}{', residual kept' * kept}",
                    functools.partial(forward, dictionary, nonlinearity=nonlinearity, keep_residual=kept),
                )
        for nonlinearity, wants_codes, wants_update in itertools.product(
            ("soft_threshold", "identity"), (True, False), (True, False)
        ):
            if nonlinearity != "soft_threshold" or not (wants_codes and wants_update):
                names = ["residual", *itertools.compress(("codes", "update"), (wants_codes, wants_update))]
                yield Case(
                    f"backward, {nonlinearity}, of {', '.join(names)}",
                    functools.partial(
                        backward, nonlinearity=nonlinearity, wants_codes=wants_codes, wants_update=wants_update
                    ),
                )
        yield Case(
            "forward, transposed dictionary",
            functools.partial(
                forward, _empty(dtype, atoms, width).t(), nonlinearity="soft_threshold", keep_residual=True
            ),
        )


def residual_linear_cases(dtype: torch.dtype) -> Iterator[Case]:
    """The nonlinearities, weights that are transposed, residuals that are a matrix or a row."""
    for rows, depth, columns in ((64_000, 256, 1024), (16_384, 768, 768), (1000, 130, 70)):
        x, weight = _empty(dtype, rows, depth), _empty(dtype, depth, columns)
        residual = _empty(dtype, rows, columns)
        yield Case(
            f"{rows} rows, n {depth}, m {columns}",
            functools.partial(residual_linear.residual_linear, x, weight, residual),
            (x, weight, residual),
            2 * rows * depth * columns,
            aligned=depth % 16 == columns % 16 == 0,
        )
    x, weight, residual = _empty(dtype, 16_384, 768), _empty(dtype, 768, 768), _empty(dtype, 16_384, 768)
    for nonlinearity in ("soft_threshold", "identity"):
        yield Case(
            nonlinearity,
            functools.partial(residual_linear.residual_linear, x, weight, residual, nonlinearity=nonlinearity),
        )
    yield Case(
        "transposed weight, residual a row",
        functools.partial(residual_linear.residual_linear, x, weight.t(), _empty(dtype, 768)),
    )


def _remainder(output: Tensor) -> Tensor | None:
    """What the forward of a training step keeps of an output in 16 bits."""
    return torch.empty_like(output) if output.element_size() == 2 else None


def streaming_attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Long sequences: the widths of every row of the block tables, and every flag."""
    sequences, tokens = 64, 1024
    lengths = _empty(torch.int64, sequences)
    log_sum_exp = _empty(torch.float32, sequences, tokens)
    for width in (64, 128, 256, 200, 16):
        z = _empty(dtype, sequences, tokens, width)
        flop = 4 * sequences * tokens**2 * width
        options = {"scale": 1.0, "energy": False, "remainder": _remainder(z)}
        yield Case(
            f"forward, T {tokens}, d {width}, tied",
            functools.partial(streaming_attention.streaming_forward, z, None, None, **options),
            (z,),
            flop,
            aligned=width % 16 == 0,
        )
        yield Case(
            f"backward, T {tokens}, d {width}, tied",
            functools.partial(streaming_attention.streaming_backward, z, None, z, log_sum_exp, z, None, **options),
            (z, z, log_sum_exp, z),
            2 * flop,
            aligned=width % 16 == 0,
        )
    for width, padded, energy in itertools.product((64, 256), (False, True), (False, True)):
        z = _empty(dtype, sequences, tokens, width)
        flags = f", d {width}" + ", lengths" * padded + ", energy" * energy
        count = lengths if padded else None
        forward = functools.partial(streaming_attention.streaming_forward, z, lengths=count, scale=1.0, energy=energy)
        yield Case(f"forward without a backward{flags}", functools.partial(forward, values=z))
        if padded or energy:
            yield Case(f"forward without a backward, tied{flags}", functools.partial(forward, values=None))
        forward = functools.partial(forward, remainder=_remainder(z))
        yield Case(f"forward{flags}", functools.partial(forward, values=z))
        backward = functools.partial(
            streaming_attention.streaming_backward,
            z,
            remainder=_remainder(z),
            output=z,
            log_sum_exp=log_sum_exp,
            grad_output=z,
            lengths=count,
            scale=1.0,
            energy=energy,
        )
        yield Case(f"backward{flags}", functools.partial(backward, values=z))
        yield Case(f"backward of z alone{flags}", functools.partial(backward, values=z, needs_values=False))
        yield Case(f"backward of the values alone{flags}", functools.partial(backward, values=z, needs_z=False))
        if padded or energy:
            yield Case(f"forward, tied{flags}", functools.partial(forward, values=None))
            yield Case(f"backward, tied{flags}", functools.partial(backward, values=None))


def wide_attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Long sequences of wide tokens, and every flag."""
    sequences, tokens, width = 16, 1024, 1024
    z = _empty(dtype, sequences, tokens, width)
    log_sum_exp = _empty(torch.float32, sequences, tokens)
    flop = 4 * sequences * tokens**2 * width
    shape = f"T {tokens}, d {width}, tied"
    kept = {"remainder": _remainder(z)}
    yield Case(
        f"forward, {shape}",
        functools.partial(wide_attention.wide_forward, z, None, None, 1.0, False, **kept),
        (z,),
        flop,
    )
    yield Case(
        f"backward, {shape}",
        functools.partial(wide_attention.wide_backward, z, None, z, log_sum_exp, z, None, 1.0, False, **kept),
        (z, z, log_sum_exp, z),
        2 * flop,
    )
    for lengths, energy in itertools.product((None, _empty(torch.int64, sequences)), (False, True)):
        flags = ", lengths" * (lengths is not None) + ", energy" * energy
        options = {"lengths": lengths, "scale": 1.0, "energy": energy}
        forward = functools.partial(wide_attention.wide_forward, z, z, **options)
        yield Case(f"forward without a backward{flags}", forward)
        yield Case(f"forward{flags}", functools.partial(forward, **kept))
        backward = functools.partial(
            wide_attention.wide_backward, z, z, output=z, log_sum_exp=log_sum_exp, grad_output=z, **options, **kept
        )
        yield Case(f"backward{flags}", backward)


def cross_entropy_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Chunks of logits of a power of two, of GPT-2's odd vocabulary and of Llama's; the flags at the odd one."""
    for rows, vocabulary in ((1024, 128_256), (2048, 50_257), (2048, 1024), (4096, 10)):
        logits, targets = _empty(dtype, rows, vocabulary), _empty(torch.int64, rows)
        vectors = [_empty(torch.float32, rows) for _ in range(3)]
        call = functools.partial(cross_entropy.cross_entropy_, logits, targets, ignore_index=-100)
        both = functools.partial(call, *vectors, softcap=None, smoothing=0.0)
        yield Case(
            f"loss and gradient, {rows} rows, V {vocabulary}",
            # In place: what it reads is written once more.
            lambda both=both, written=(logits, *vectors[:2]): (both(), written),
            (logits, targets, vectors[2]),
            0,
            aligned=vocabulary % 16 == 0,
        )
        if vocabulary not in (50_257, 128_256):
            continue
        losses, log_sums, scales = vectors
        passes = {"loss": (losses, log_sums, None), "gradient": (None, log_sums, scales), "both": tuple(vectors)}
        for (name, given), softcap, smoothing in itertools.product(passes.items(), (None, 30.0), (0.0, 0.1)):
            flags = ", softcap" * (softcap is not None) + ", smoothing" * (smoothing > 0)
            if name == "both" and not flags:
                continue
            yield Case(
                f"{name}, V {vocabulary}{flags}",
                functools.partial(call, *given, softcap=softcap, smoothing=smoothing),
                aligned=vocabulary % 16 == 0,
            )


def reconstruction_cases(dtype: torch.dtype) -> Iterator[Case]:
    """All depths in one launch: how many, with padding or without, which gradients are wanted."""
    tokens, width = 64_000, 256
    target, padding = _empty(dtype, tokens, width), _empty(torch.bool, tokens)
    for depths in (6, 2, 13):
        states = [_empty(dtype, tokens, width) for _ in range(depths)]
        factors = _empty(torch.float32, depths)
        gradients = functools.partial(reconstruction.reconstruction_gradients, states, target)
        yield Case(
            f"errors of {depths} depths",
            functools.partial(reconstruction.reconstruction_errors, states, target, None),
            (*states, target),
            0,
        )
        yield Case(
            f"gradients of {depths} depths",
            functools.partial(gradients, None, factors, [True] * depths, False),
            (*states, target, factors),
            0,
        )
        if depths != 6:
            continue
        yield Case("errors, padding", functools.partial(reconstruction.reconstruction_errors, states, target, padding))
        for padded, wants_target in itertools.product((False, True), repeat=2):
            flags = ", padding" * padded + ", of the target too" * wants_target
            some = [depth % 2 == 0 for depth in range(depths)]
            mask = padding if padded else None
            if flags:
                yield Case(
                    f"gradients{flags}", functools.partial(gradients, mask, factors, [True] * depths, wants_target)
                )
            yield Case(
                f"gradients of every other depth{flags}",
                functools.partial(gradients, mask, factors, some, wants_target),
            )


def unrolled_layer_cases(dtype: torch.dtype) -> Iterator[Case]:
    """The reference layer, tied and with a dictionary a layer, with and without the loss in it, and every flag."""
    if dtype.itemsize > 2:
        return
    sequences, tokens, atoms = 3200, 20, 1024
    rows, lengths = sequences * tokens, _empty(torch.int64, sequences)
    error = _empty(torch.float32, 1)
    for width in (256, 64, 100):
        codes = _empty(dtype, sequences, tokens, atoms)
        signal, dictionary = _empty(dtype, sequences, tokens, width), _empty(dtype, width, atoms)
        product, mixing = 2 * rows * width * atoms, 2 * rows * tokens
        forward = functools.partial(
            unrolled_layer.unrolled_forward, codes, signal, signal, dictionary, step=0.1, threshold=0.1, scale=1.0
        )
        backward = functools.partial(
            unrolled_layer.unrolled_backward, codes, signal, signal, dictionary, step=0.1, scale=1.0
        )
        results = {"next_codes": codes, "next_projection": signal}
        plain: dict[str, Any] = {
            "next_dictionary": None, "target": None, "lengths": None, "nonlinearity": "soft_threshold"
        }  # fmt: skip
        upstream: dict[str, Any] = {"grad_next_codes": codes, "grad_next_projection": signal, "grad_error": None}
        yield Case(
            f"forward, n {width}, m {atoms}",
            functools.partial(forward, **plain),
            (codes, signal, signal, dictionary),
            2 * product + mixing * (2 * width + atoms),
            aligned=width % 16 == 0,
        )
        yield Case(
            f"backward, n {width}, m {atoms}",
            functools.partial(backward, **results, **plain, **upstream),
            (codes, signal, signal, dictionary, codes, signal, codes, signal),
            2 * product + mixing * (5 * width + 2 * atoms),
            aligned=width % 16 == 0,
        )
        if width != 256:
            continue
        changes: dict[str, dict[str, Any]] = {
            "loss": {"target": signal},
            "lengths": {"lengths": lengths},
            "loss, lengths": {"target": signal, "lengths": lengths},
            "dictionary a layer": {"next_dictionary": dictionary.clone()},
            "dictionary a layer, loss": {"next_dictionary": dictionary.clone(), "target": signal},
            "dictionary a layer, lengths": {"next_dictionary": dictionary.clone(), "lengths": lengths},
            "dictionary a layer, loss, lengths": {
                "next_dictionary": dictionary.clone(),
                "target": signal,
                "lengths": lengths,
            },
            "relu": {"nonlinearity": "relu"},
            "identity": {"nonlinearity": "identity"},
        }
        for name, change in changes.items():
            with_loss = {"grad_error": error if "target" in change else None}
            yield Case(f"forward, {name}", functools.partial(forward, **{**plain, **change}))
            yield Case(
                f"backward, {name}",
                functools.partial(backward, **results, **{**plain, **change, **upstream, **with_loss}),
            )
        for present in ({"grad_next_codes": codes}, {"grad_next_projection": signal}, {"grad_error": error}):
            (name,) = present
            absent = dict.fromkeys(upstream)
            yield Case(
                f"backward, only {name}",
                functools.partial(backward, **results, **{**plain, "target": signal, **absent, **present}),
            )
        for wanted in itertools.product((True, False), repeat=3):
            needs = dict(zip(("needs_dictionary", "needs_projection", "needs_codes"), wanted, strict=True))
            if not all(wanted):
                names = ["signal", *(name.removeprefix("needs_") for name, need in needs.items() if need)]
                yield Case(
                    f"backward, of {', '.join(names)}",
                    functools.partial(backward, **results, **plain, **upstream, **needs),
                )


# A family, and the function that lists its cases: the first case of a kernel is the one that the tests compile.
FAMILIES: dict[str, Callable[[torch.dtype], Iterator[Case]]] = {
    "packed_attention": packed_attention_cases,
    "streaming_attention": streaming_attention_cases,
    "wide_attention": wide_attention_cases,
    "unrolled_layer": unrolled_layer_cases,
    "lista": lista_cases,
    "residual_linear": residual_linear_cases,
    "cross_entropy": cross_entropy_cases,
    "reconstruction": reconstruction_cases,
}
