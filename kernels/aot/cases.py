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
from cdt_fast.kernels.aot.case import Case
from cdt_fast.kernels.arguments import (
    DepthWeightsArguments,
    DualUpdateArguments,
    ListaStepArguments,
    ListaStepBackwardArguments,
    Nonlinearity,
    ReconstructionLossArguments,
    ReconstructionLossBackwardArguments,
    ResidualLinearArguments,
    SweepArguments,
    SymmetricAttentionArguments,
    SymmetricAttentionBackwardArguments,
    UnrolledLayerArguments,
    UnrolledLayerBackwardArguments,
)
from cdt_fast.kernels.dual_update import depth_weights, dual_update
from cdt_fast.kernels.layerwise_reconstruction_loss import reconstruction_backward, reconstruction_forward
from cdt_fast.kernels.lista_step import lista_step_backward, lista_step_forward
from cdt_fast.kernels.residual_linear import residual_linear_forward
from cdt_fast.kernels.symmetric_attention_packed import packed_backward, packed_forward
from cdt_fast.kernels.symmetric_attention_streaming import streaming_backward, streaming_forward
from cdt_fast.kernels.unrolled_layer import unrolled_backward, unrolled_forward


def _empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention_case(name: str, launcher: Callable[..., Any], is_size: bool = False, **given: Any) -> Case:
    """A forward, or with `grad_output` a backward, of what is given of the arguments.

    A streamed output keeps its remainder in 16 bits, but where `keeps` is false.
    """
    z, backward = given["z"], "grad_output" in given
    if backward:
        log_sum_exp = _empty(torch.float32, *z.shape[:-1])
        kept = z if given.pop("keeps", False) and z.element_size() == 2 else z.new_empty(0)
        given |= {"output": given["grad_output"], "log_sum_exp": log_sum_exp, "kept": kept}
    arguments = (SymmetricAttentionBackwardArguments if backward else SymmetricAttentionArguments)(**given)
    return Case(name, functools.partial(launcher, arguments), is_size, aligned=z.shape[-1] % 16 == 0)


def _flagged(z: Tensor) -> Iterator[tuple[str, dict[str, Any]]]:
    """The flags of an attention of `z` in words, and what is given of its arguments."""
    for padded, energy in itertools.product((False, True), repeat=2):
        lengths = _empty(torch.int64, len(z)) if padded else None
        yield ", lengths" * padded + ", energy" * energy, {"z": z, "lengths": lengths, "energy": energy}


def packed_attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Short sequences: the reference width, each width class, and every flag."""
    forward = functools.partial(_attention_case, launcher=packed_forward)
    backward = functools.partial(_attention_case, launcher=packed_backward)
    tokens = 20
    for width, value_width in ((256, 256), (64, 64), (250, 250), (256, 1024)):
        z, values = _empty(dtype, 3200, tokens, width), _empty(dtype, 3200, tokens, value_width)
        shape = f"T {tokens}, d {width}, values {value_width} wide"
        yield forward(f"forward, {shape}", z=z, values=values, is_size=True)
        yield backward(f"backward, {shape}", z=z, values=values, grad_output=values, is_size=True)
    for longest in (33, 64):
        z = _empty(dtype, 1000, longest, 64)
        yield forward(f"forward, T {longest}, d 64", z=z, values=z)
        yield backward(f"backward, T {longest}, d 64, tied", z=z, grad_output=z)
    z = _empty(dtype, 3200, tokens, 256)
    for flags, given in _flagged(z):
        if flags:
            yield forward(f"forward{flags}", **given, values=z)
        given["grad_output"] = z
        yield backward(f"backward, tied{flags}", **given)
        given["values"] = z
        if flags:
            yield backward(f"backward{flags}", **given)
        yield backward(f"backward of z alone{flags}", **given, needs_values=False)
        yield backward(f"backward of the values alone{flags}", **given, needs_z=False)


def streaming_attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Long sequences: the widths of every row of the block tables, and every flag."""
    forward = functools.partial(_attention_case, launcher=streaming_forward)
    backward = functools.partial(_attention_case, launcher=streaming_backward)
    sequences, tokens = 64, 1024
    for width in (64, 128, 256, 200, 16):
        z = _empty(dtype, sequences, tokens, width)
        shape = f"T {tokens}, d {width}, tied"
        yield forward(f"forward, {shape}", z=z, keeps=True, is_size=True)
        yield backward(f"backward, {shape}", z=z, grad_output=z, keeps=True, is_size=True)
    z = _empty(dtype, sequences, tokens, 256)
    for flagged, given in _flagged(z):
        flags = f", d 256{flagged}"
        yield forward(f"forward without a backward{flags}", **given, values=z)
        if flagged:
            yield forward(f"forward without a backward, tied{flags}", **given)
        given["keeps"] = True
        yield forward(f"forward{flags}", **given, values=z)
        if flagged:
            yield forward(f"forward, tied{flags}", **given)
        given["grad_output"] = z
        yield backward(f"backward{flags}", **given, values=z)
        yield backward(f"backward of z alone{flags}", **given, values=z, needs_values=False)
        yield backward(f"backward of the values alone{flags}", **given, values=z, needs_z=False)
        if flagged:
            yield backward(f"backward, tied{flags}", **given)


NONLINEARITIES: tuple[Nonlinearity, ...] = ("soft_threshold", "hard_threshold", "relu", "identity")


def lista_cases(dtype: torch.dtype) -> Iterator[Case]:
    """One kernel for narrow tokens: widths, nonlinearities, what is kept or needed, a transposed dictionary."""

    def forward(name: str, is_size: bool = False, aligned: bool = True, **given: Any) -> Case:
        arguments = ListaStepArguments(step=0.1, threshold=0.1, **given)
        return Case(f"forward, {name}", functools.partial(lista_step_forward, arguments), is_size, aligned)

    def backward(name: str, is_size: bool = False, aligned: bool = True, **given: Any) -> Case:
        arguments = ListaStepBackwardArguments(step=0.1, **given)
        return Case(f"backward, {name}", functools.partial(lista_step_backward, arguments), is_size, aligned)

    rows, atoms = 64_000, 1024
    codes = _empty(dtype, rows, atoms)
    for width in (256, 100, 64, 16):
        signal, dictionary = _empty(dtype, rows, width), _empty(dtype, width, atoms)
        before: dict[str, Any] = {"codes": codes, "signal": signal}
        after = {"grad_output": codes, "output": codes, "dictionary": dictionary}
        shape, aligned = f"n {width}, m {atoms}", width % 16 == 0
        yield forward(shape, True, aligned, **before, dictionary=dictionary)
        yield backward(shape, True, aligned, **after)
        if width != 256:
            continue
        for nonlinearity, kept in itertools.product(NONLINEARITIES, (True, False)):
            if (nonlinearity, kept) != ("soft_threshold", True):
                flags = {"nonlinearity": nonlinearity, "keep_residual": kept}
                yield forward(f"{nonlinearity}{', residual kept' * kept}", **before, dictionary=dictionary, **flags)
        for nonlinearity, needs_codes, needs_update in itertools.product(
            ("soft_threshold", "identity"), (True, False), (True, False)
        ):
            if nonlinearity != "soft_threshold" or not (needs_codes and needs_update):
                names = ["residual", *itertools.compress(("codes", "update"), (needs_codes, needs_update))]
                needs = {"needs_codes": needs_codes, "needs_dictionary": needs_update}
                yield backward(f"{nonlinearity}, of {', '.join(names)}", **after, nonlinearity=nonlinearity, **needs)
        yield forward("transposed dictionary", **before, dictionary=_empty(dtype, atoms, width).t())


def residual_linear_cases(dtype: torch.dtype) -> Iterator[Case]:
    """The nonlinearities, weights that are transposed, residuals that are a matrix or a row."""

    def call(x: Tensor, weight: Tensor, residual: Tensor, nonlinearity: Nonlinearity = "relu") -> Callable[[], Tensor]:
        linear = ResidualLinearArguments(x=x, weight=weight, residual=residual, nonlinearity=nonlinearity)
        return functools.partial(residual_linear_forward, linear)

    for rows, depth, columns in ((64_000, 256, 1024), (16_384, 768, 768), (1000, 130, 70)):
        x, weight = _empty(dtype, rows, depth), _empty(dtype, depth, columns)
        residual = _empty(dtype, rows, columns)
        yield Case(
            f"{rows} rows, n {depth}, m {columns}",
            call(x, weight, residual),
            is_size=True,
            aligned=depth % 16 == columns % 16 == 0,
        )
    x, weight, residual = _empty(dtype, 16_384, 768), _empty(dtype, 768, 768), _empty(dtype, 16_384, 768)
    yield Case("soft_threshold", call(x, weight, residual, "soft_threshold"))
    yield Case("identity", call(x, weight, residual, "identity"))
    yield Case("transposed weight, residual a row", call(x, weight.t(), _empty(dtype, 768)))


def cross_entropy_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Chunks of logits of a power of two, of GPT-2's odd vocabulary and of Llama's; the flags at these two.

    With the KL to the last depth too, detached or not, and the gradient alone, which reads what the loss has written.
    """
    for rows, vocabulary in ((1024, 128_256), (2048, 50_257), (2048, 1024), (4096, 10)):
        logits, of_last = (_empty(dtype, rows, vocabulary) for _ in range(2))
        to_last = _empty(torch.float32, rows, vocabulary)
        losses, log_sums, log_sums_of_last, scales = (_empty(torch.float32, rows) for _ in range(4))
        targets, classes = (_empty(torch.int64, rows) for _ in range(2))

        def case(
            name: str, given: dict[str, Tensor], softcap: float | None = None, smoothing: float = 0.0,
            is_size: bool = False, logits: Tensor = logits, every: tuple[Tensor, ...] = (logits, targets, log_sums),
        ) -> Case:  # fmt: skip
            flags = ", softcap" * (softcap is not None) + ", smoothing" * (smoothing > 0)
            options: dict[str, Any] = {"ignore_index": -100, "softcap": softcap, "smoothing": smoothing, "share": 0.5}
            call = functools.partial(cross_entropy.cross_entropy_, SweepArguments(*every, **given), **options)
            return Case(f"{name}, V {logits.shape[1]}{flags}", call, is_size, aligned=logits.shape[1] % 16 == 0)

        loss, gradient = {"losses": losses}, {"scales": scales, "out": logits}
        kl, beside = {"of_last": of_last}, {"of_last": of_last, "to_last": to_last}
        yield case(f"loss and gradient, {rows} rows", loss | gradient, is_size=True)
        if vocabulary not in (50_257, 128_256):
            continue
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
        extremes = [(None, 0.0), (30.0, 0.1)]  # of how many values are alive at once
        for name, given in passes.items():
            for softcap, smoothing in extremes if "KL" in name else [*extremes, (None, 0.1), (30.0, 0.0)]:
                if name != "both" or softcap or smoothing:
                    yield case(name, given, softcap, smoothing)
        for name in ("loss", "both", "loss, KL", "both, KL of both depths"):
            yield case(f"{name}, arg-max", passes[name] | {"classes": classes}, 30.0, 0.1)


def reconstruction_cases(dtype: torch.dtype) -> Iterator[Case]:
    """All depths in one launch: how many, with padding or without, which gradients are needed."""
    tokens, width = 64_000, 256
    target, padding = _empty(dtype, tokens, width), _empty(torch.bool, tokens)
    for depths in (6, 2, 13):
        states = [_empty(dtype, tokens, width) for _ in range(depths)]
        factors = _empty(torch.float32, depths)
        loss = {"reconstructions": states, "target": target}

        def forward(name: str, is_size: bool = False, loss: Any = loss, **given: Any) -> Case:
            arguments = ReconstructionLossArguments(**loss, **given)
            return Case(name, functools.partial(reconstruction_forward, arguments), is_size)

        def backward(
            name: str, is_size: bool = False, every: int = 1, loss: Any = loss, factors: Any = factors, **given: Any
        ) -> Case:
            needed = [depth % every == 0 for depth in range(len(factors))]
            arguments = ReconstructionLossBackwardArguments(
                **loss, grad=factors, needs_reconstructions=needed, **{"needs_target": False, **given}
            )
            return Case(name, functools.partial(reconstruction_backward, arguments, factors), is_size)

        yield forward(f"errors of {depths} depths", True, padding=None)
        yield backward(f"gradients of {depths} depths", True, padding=None)
        if depths != 6:
            continue
        yield forward("errors, padding", padding=padding)
        for padded, needs_target in itertools.product((False, True), repeat=2):
            flags = ", padding" * padded + ", of the target too" * needs_target
            given = {"padding": padding if padded else None, "needs_target": needs_target}
            if flags:
                yield backward(f"gradients{flags}", **given)
            yield backward(f"gradients of every other depth{flags}", every=2, **given)


def unrolled_layer_cases(dtype: torch.dtype) -> Iterator[Case]:
    """The reference layer, tied and with a dictionary a layer, with and without the loss in it, and every flag."""
    if dtype.itemsize > 2:
        return
    sequences, tokens, atoms = 3200, 20, 1024
    lengths = _empty(torch.int64, sequences)
    for width in (256, 64, 100):
        codes = _empty(dtype, sequences, tokens, atoms)
        signal, dictionary = _empty(dtype, sequences, tokens, width), _empty(dtype, width, atoms)
        layer: dict[str, Any] = {"codes": codes, "signal": signal, "projection": signal, "dictionary": dictionary}
        layer |= {"step": 0.1, "threshold": 0.1}
        after: dict[str, Any] = {**layer, "next_codes": codes, "next_projection": signal}
        upstream: dict[str, Any] = {"grad_next_codes": codes, "grad_next_projection": signal}

        def forward(name: str, is_size: bool = False, layer: Any = layer, **given: Any) -> Case:
            arguments = UnrolledLayerArguments(**layer, **given)
            aligned = arguments.signal.shape[-1] % 16 == 0
            return Case(f"forward, {name}", functools.partial(unrolled_forward, arguments), is_size, aligned)

        def backward(name: str, is_size: bool = False, layer: Any = after, **given: Any) -> Case:
            arguments = UnrolledLayerBackwardArguments(**layer, **given)
            aligned = arguments.signal.shape[-1] % 16 == 0
            return Case(f"backward, {name}", functools.partial(unrolled_backward, arguments), is_size, aligned)

        shape = f"n {width}, m {atoms}"
        yield forward(shape, True)
        yield backward(shape, True, **upstream)
        if width != 256:
            continue
        error = _empty(torch.float32, 1)
        loss, padded, untied = {"target": signal}, {"lengths": lengths}, {"next_dictionary": dictionary.clone()}
        start: dict[str, Any] = {"codes": None}  # the first layer of a network
        changes: dict[str, dict[str, Any]] = {
            "loss": loss,
            "lengths": padded,
            "loss, lengths": loss | padded,
            "dictionary a layer": untied,
            "dictionary a layer, loss": untied | loss,
            "dictionary a layer, lengths": untied | padded,
            "dictionary a layer, loss, lengths": untied | loss | padded,
            "hard_threshold": {"nonlinearity": "hard_threshold"},
            "relu": {"nonlinearity": "relu"},
            "identity": {"nonlinearity": "identity"},
        }
        for name, change in changes.items():
            given_error = error if "target" in change else None
            yield forward(name, **change)
            yield backward(name, **change, **upstream, grad_error=given_error)
            yield forward(f"{name}, without codes", layer=layer | start, **change)
            kept = after | start | {"needs_codes": False, "needs_signal": name == "loss"}
            yield backward(f"{name}, without codes", layer=kept, **change, **upstream, grad_error=given_error)
        kept = after | start | {"needs_codes": False, "needs_signal": False}
        yield backward("loss, of an input, without codes", layer=kept, **loss, **upstream, grad_error=error)
        for name, tensor in {**upstream, "grad_error": error}.items():
            yield backward(f"only {name}", target=signal, **{name: tensor})
        for needed in itertools.product((True, False), repeat=3):
            needs = dict(zip(("needs_dictionary", "needs_projection", "needs_codes"), needed, strict=True))
            if not all(needed):
                names = ["signal", *(name.removeprefix("needs_") for name, need in needs.items() if need)]
                yield backward(f"of {', '.join(names)}", **upstream, **needs)


def dual_update_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Of few and of many depths, with every flag; the state is float64 whatever the tokens are."""
    if dtype != torch.bfloat16:
        return

    def numbers(*shape: int) -> Tensor:
        return _empty(torch.float64, *shape)

    count = _empty(torch.int64)
    for depths, flags in (
        *((depths, {}) for depths in (6, 33, 200)),
        (6, {"resilience": "decay", "relative": False}),
        (6, {"resilience": None, "average": None, "average_updates": None, "reference_measurements": None}),
        (6, {"moves": False}),
    ):
        state = ("factors", "multipliers", "slacks", "first_moment", "second_moment", "updates")
        flag = _empty(torch.bool, depths)
        average: dict[str, Any] = {"average": numbers(depths), "average_updates": count}
        given: dict[str, Any] = {name: numbers(depths) for name in state} | average
        given |= {"accumulated": numbers(depths + 1), "settings": numbers(7), "exists": flag, "uses_reference": flag}
        given |= {"reference": numbers(), "reference_measurements": count, "skipped_updates": count}
        given |= {"measurements": 20, "averaged": 10, "epsilon": 1e-8}
        given |= {"resilience": "slack", "relative": True, "moves": True, **flags}
        named = ", ".join(f"{name} {value}" for name, value in flags.items())
        name, is_size = f"{depths} depths{named and ', '}{named}", not flags
        yield Case(f"update, {name}", functools.partial(dual_update, DualUpdateArguments(**given)), is_size)
        if "moves" in flags or "relative" in flags:
            continue
        of_weights = {"multipliers": numbers(depths), "coefficients": numbers(depths), "upstream": numbers(depths - 1)}
        arguments = DepthWeightsArguments(**of_weights, average=given["average"])
        yield Case(f"weights, {name}", functools.partial(depth_weights, arguments), is_size)


# A family, and the function that lists its cases: the first case of a kernel is the one that the tests compile.
FAMILIES: dict[str, Callable[[torch.dtype], Iterator[Case]]] = {
    "symmetric_attention_packed": packed_attention_cases,
    "symmetric_attention_streaming": streaming_attention_cases,
    "unrolled_layer": unrolled_layer_cases,
    "lista_step": lista_cases,
    "residual_linear": residual_linear_cases,
    "layerwise_cross_entropy": cross_entropy_cases,
    "layerwise_reconstruction_loss": reconstruction_cases,
    "dual_update": dual_update_cases,
}
