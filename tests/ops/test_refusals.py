"""Bad calls of the ops: one line that names the argument, what was given and what is expected."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cdt_fast import ops
from cdt_fast.checks import InputError
from tests.ops.battery import LOSSES, LOW_DTYPES, build, call

ZEROS = torch.zeros
STEP: dict[str, Any] = {"step": 0.2, "threshold": 0.1}
INT64 = torch.int64
GOOD: dict[str, dict[str, Any]] = {
    "soft_threshold": {"x": ZEROS(3), "threshold": 0.1},
    "lista_step": {"codes": ZEROS(3, 5), "signal": ZEROS(3, 4), "dictionary": ZEROS(4, 5), **STEP},
    "residual_linear": {"x": ZEROS(3, 4), "weight": ZEROS(4, 5), "residual": ZEROS(5)},
    "symmetric_attention": {"z": ZEROS(2, 3, 4)},
    "unrolled_layer": {"codes": ZEROS(2, 3, 5), "signal": ZEROS(2, 3, 4), "dictionary": ZEROS(4, 5), **STEP},
    "layerwise_reconstruction_loss": {"reconstructions": [ZEROS(2, 3)], "target": ZEROS(2, 3)},
    "layerwise_cross_entropy": {
        "hidden_states": [ZEROS(2, 3)],
        "weight": ZEROS(4, 3),
        "targets": ZEROS(2, dtype=INT64),
    },
}

FACTORS = [
    *(("lista_step", name) for name in ("step", "threshold")),
    *(("residual_linear", name) for name in ("alpha", "threshold")),
    *(("unrolled_layer", name) for name in ("step", "threshold", "scale")),
    *(("symmetric_attention", "scale"), ("soft_threshold", "threshold")),
]


class Sharded(torch.Tensor):
    """As a DTensor, which needs a process group."""

    device_mesh = None


class Group:
    group_name = "0"


NUMBER = r"must be a finite number"
BAD: dict[str, list[tuple[dict[str, Any], str]]] = {
    "soft_threshold": [
        ({"x": torch.eye(3).to_sparse()}, r"x must be a dense .* got \(3, 3\) float32 sparse_coo on cpu"),
        ({"threshold": "0.1"}, rf"threshold {NUMBER} >= 0, got '0.1' \(str\)"),
        ({"threshold": ZEROS(2)}, r"threshold must broadcast against x \(3,\), got \(2,\)"),
        ({"threshold": ZEROS(3, 3)}, r"threshold must broadcast against x \(3,\), got \(3, 3\)"),
        ({"threshold": torch.zeros(3, device="meta")}, "threshold is on meta but x is on cpu"),
        ({"threshold": torch.tensor(1)}, r"threshold must be a dense .* tensor or a number, got \(\) int64"),
    ],
    "lista_step": [
        ({"codes": torch.tensor(1.0)}, r"codes must be .*\[\.\.\., m\], got \(\) float32"),
        ({"signal": ZEROS(2, 4)}, r"signal must have shape \(3, 4\).*got \(2, 4\)"),
        ({"dictionary": ZEROS(5)}, r"dictionary must be .*\[n, m\], got \(5,\)"),
        ({"dictionary": ZEROS(5, 4)}, r"dictionary must have shape \(4, 5\).*got \(5, 4\)"),
        ({"threshold": ZEROS(5)}, r"threshold must be a number, got a tensor: \(5,\) float32"),
        (
            {"nonlinearity": "tanh"},
            r"nonlinearity must be one of 'soft_threshold', 'relu', got 'tanh'",
        ),
    ],
    "residual_linear": [
        ({"x": torch.tensor(1.0)}, r"x must be .*\[\.\.\., n\], got \(\) float32"),
        ({"weight": ZEROS(5)}, r"weight must be .*\[n, m\], got \(5,\)"),
        ({"weight": ZEROS(5, 4)}, r"weight must have shape \(4, 4\).*got \(5, 4\)"),
        ({"residual": ZEROS(2, 5)}, r"residual must have shape \(5,\) or \(3, 5\), got \(2, 5\)"),
        ({"residual": ZEROS(1)}, r"residual must have shape \(5,\) or \(3, 5\), got \(1,\)"),
        ({"nonlinearity": "tanh"}, r"nonlinearity must be .*'soft_threshold', 'relu', 'identity', got 'tanh'"),
    ],
    "symmetric_attention": [
        ({"z": ZEROS(4)}, r"z must be .*\[\.\.\., T, d\], got \(4,\) float32"),
        ({"values": ZEROS(2, 4, 4)}, r"values must have shape \(2, 3, 4\).*got \(2, 4, 4\)"),
        ({"lengths": torch.tensor(2)}, r"lengths must have shape \(2,\).*got \(\)"),
        ({"energy": 1}, r"energy must be True or False, got 1"),
        ({"scale": None}, rf"scale {NUMBER}, got None"),
    ],
    "unrolled_layer": [
        ({"codes": ZEROS(5)}, r"codes must be .*\[\.\.\., T, m\], got \(5,\) float32"),
        ({"signal": ZEROS(4)}, r"signal must be .*\[\.\.\., T, n\], got \(4,\)"),
        ({"signal": ZEROS(2, 2, 4)}, r"signal must have shape \(2, 3, 4\).*got \(2, 2, 4\)"),
        ({"dictionary": ZEROS(5)}, r"dictionary must be .*\[n, m\], got \(5,\)"),
        ({"dictionary": ZEROS(1, 4, 5)}, r"dictionary must have shape \(4, 5\).*got \(1, 4, 5\)"),
        ({"projection": ZEROS(2, 3, 5)}, r"projection must have shape \(2, 3, 4\).*got \(2, 3, 5\)"),
        ({"next_dictionary": ZEROS(4, 6)}, r"next_dictionary must have shape \(4, 5\).*got \(4, 6\)"),
        ({"next_dictionary": ZEROS(5)}, r"next_dictionary must be .*\[k, m\], got \(5,\)"),
        ({"target": ZEROS(2, 3, 5)}, r"target must have shape \(2, 3, 4\) .*got \(2, 3, 5\)"),
        (
            {"target": ZEROS(2, 3, 4), "next_dictionary": ZEROS(6, 5)},
            r"target must have shape \(2, 3, 6\) .*width of the next projection.*got \(2, 3, 4\)",
        ),
        ({"step": True}, rf"step {NUMBER} >= 0, got True \(bool\)"),
        ({"step": torch.tensor([0.1, 0.2])}, r"step must be a number, got a tensor: \(2,\) float32"),
        ({"step": torch.tensor(0.1, requires_grad=True)}, r"step must be a number, got a tensor"),
        (
            {"nonlinearity": "gelu"},
            r"nonlinearity must be one of 'soft_threshold', 'relu', got 'gelu'",
        ),
    ],
    "layerwise_reconstruction_loss": [
        ({"reconstructions": []}, r"reconstructions must be a list of one tensor a depth, got \[\]"),
        ({"reconstructions": ZEROS(2, 3, 4)}, r"reconstructions must be a list .* got \(2, 3, 4\) float32"),
        ({"reconstructions": iter([ZEROS(2, 3)])}, r"reconstructions must be a list .* got <list_iterator"),
        ({"reconstructions": [ZEROS(2, 3), ZEROS(3)]}, r"reconstructions\[1\] must have shape \(2, 3\).*got \(3,\)"),
        ({"reconstructions": [None]}, r"reconstructions\[0\] must be a dense floating-point tensor .* got None"),
        ({"reconstructions": [ZEROS(2, 3, device="meta")]}, r"reconstructions\[0\] is on meta but target is on cpu"),
        ({"target": torch.tensor(1.0)}, r"target must be .*\[\.\.\., n\], got \(\) float32"),
        ({"lengths": torch.tensor(0)}, r"target must hold at least one token that counts"),
        *(
            ({"reconstructions": [ZEROS(*shape)], "target": ZEROS(*shape)}, r"target must hold at least one token")
            for shape in ((0, 3), (2, 0, 3))
        ),
        (
            {"target": ZEROS(3), "reconstructions": [ZEROS(3)], "lengths": torch.tensor(1)},
            r"target must be .*\[\.\.\., T, n\], got \(3,\)",
        ),
        ({"reduction": "median"}, "reduction"),
    ],
    "layerwise_cross_entropy": [
        ({"hidden_states": []}, r"hidden_states must be a list of one tensor a depth, got \[\]"),
        ({"hidden_states": ZEROS(2, 3)}, r"hidden_states must be a list .* got \(2, 3\) float32"),
        ({"hidden_states": [None]}, r"hidden_states\[0\] must be a dense floating-point tensor .* got None"),
        (
            {"hidden_states": [ZEROS(2, 3), ZEROS(3, 3)]},
            r"hidden_states\[1\] must have shape \(2, 3\) \(as hidden_states\[0\]\), got \(3, 3\)",
        ),
        ({"weight": ZEROS(3)}, r"weight must be a dense floating-point tensor \[V, d\], got \(3,\) float32"),
        ({"weight": ZEROS(4, 2)}, r"weight must have shape \(4, 3\) .* got \(4, 2\)"),
        ({"weight": ZEROS(4, 4, 3)}, r"weight must have shape \(4, 3\) .* got \(4, 4, 3\)"),
        ({"weight": ZEROS(0, 3)}, r"weight must hold at least one row, got shape \(0, 3\)"),
        ({"bias": ZEROS(3)}, r"bias must have shape \(4,\) .* got \(3,\)"),
        ({"targets": ZEROS(2)}, r"targets must be an int64 tensor .* got \(2,\) float32"),
        ({"targets": ZEROS(3, dtype=INT64)}, r"targets must have shape \(2,\) .* got \(3,\)"),
        ({"targets": ZEROS(2, dtype=INT64, device="meta")}, r"targets is on meta but hidden_states\[0\] is on cpu"),
        ({"targets": [0, 1]}, r"targets must be an int64 tensor .* or a list of 1, one a depth, got a list of 2"),
        ({"targets": [0]}, r"targets\[0\] must be an int64 tensor with one target a token, got 0 \(int\)"),
        ({"targets": [ZEROS(3, dtype=INT64)]}, r"targets\[0\] must have shape \(2,\) .* got \(3,\)"),
        ({"reduction": "none"}, r"reduction must be one of 'mean', 'sum', got 'none'"),
        ({"ignore_index": 0.5}, r"ignore_index must be an integer"),
        *(({"label_smoothing": value}, r"label_smoothing must be a number in \[0, 1\]") for value in (1.5, 10**400)),
        *(({"softcap": value}, rf"softcap {NUMBER} > 0") for value in (0.0, 10**400)),
        *(({"z_loss": value}, rf"z_loss {NUMBER} >= 0") for value in (-1.0, math.inf)),
        *(({"shift": value}, r"shift must be an integer >= 0") for value in (-1, 0.5)),
        ({"hidden_states": [ZEROS(3)], "targets": torch.tensor(1), "shift": 1}, r"shift needs .* one dimension"),
        ({"max_tokens": 0}, r"max_tokens must be an integer >= 1"),
        ({"max_tokens": 1}, r"targets hold 2 tokens that count, more than max_tokens=1"),
        ({"class_weights": ZEROS(3)}, r"class_weights must have shape \(4,\) \(one number a class\), got \(3,\)"),
        ({"class_weights": ZEROS(4, requires_grad=True)}, r"class_weights must be on cpu and require no gradient"),
        ({"softcap": 1e39}, "softcap must be a number that float32 holds, got 1e[+]39"),
        ({"z_loss": 1e39}, "z_loss must be a number that float32 holds, got 1e[+]39"),
        ({"class_weights": ZEROS(4), "label_smoothing": 0.1}, r"class_weights and .* cannot be combined"),
        ({"weight": Sharded(ZEROS(4, 3))}, r"weight is a DTensor: give its full_tensor\(\), or its to_local\(\)"),
        ({"shard": "0 of 2"}, r"shard must be HeadShard\(process group, first, classes\), got '0 of 2'"),
        ({"shard": ops.HeadShard(Group, -1, 9)}, r"shard\.first must be an integer >= 0, got -1"),
        ({"shard": ops.HeadShard(Group, 6, 9)}, r"shard\.first \+ the rows of weight must be at most 9 .* got 6 \+ 4"),
        ({"chunk_tokens": 0}, r"chunk_tokens must be an integer >= 1"),
    ],
}
# What any tensor may be wrong in, number and lengths; of the first, unless hidden states set them, no device and dtype.
TENSORS = {
    "soft_threshold": ("x",),
    "lista_step": ("codes", "signal", "dictionary"),
    "residual_linear": ("x", "weight", "residual"),
    "symmetric_attention": ("z", "values"),
    "unrolled_layer": ("codes", "signal", "dictionary", "projection", "next_dictionary", "target"),
    "layerwise_reconstruction_loss": ("target",),
    "layerwise_cross_entropy": ("weight", "bias"),
}
SHAPES = {"values": (2, 3, 4), "projection": (2, 3, 4), "next_dictionary": (4, 5), "target": (2, 3, 4), "bias": (4,)}
for op, names in TENSORS.items():
    for number, name in enumerate(names, op == "layerwise_cross_entropy"):
        good = GOOD[op].get(name, ZEROS(SHAPES.get(name, ())))
        dense = f"{name} must be a dense floating-point tensor .* got "
        BAD[op] += [({name: "Z"}, rf"{dense}'Z' \(str\)"), ({name: good.long()}, rf"{dense}.*int64")]
        BAD[op].append(({name: good.to(torch.float8_e4m3fn)}, rf"{dense}.*float8_e4m3fn"))
        if number and name != "target":  # a target has any dtype
            BAD[op].append(({name: good.double()}, rf"{name} is torch.float64 but .* is torch.float32"))
        if number:
            BAD[op].append(({name: good.to("meta")}, rf"{name} is on meta but .* is on cpu"))
for op, name in FACTORS:
    for value in (math.nan, math.inf, *([] if name in ("scale", "alpha") else [-0.1])):
        BAD[op].append(({name: value}, rf"{name} {NUMBER}.*, got {value}"))
for op in ("symmetric_attention", "unrolled_layer"):
    BAD[op] += [
        ({"lengths": torch.tensor([1, 2, 3])}, r"lengths must have shape \(2,\) \(one length a sequence\), got \(3,\)"),
        ({"lengths": torch.tensor([1.0, 2.0])}, r"lengths must be an integer tensor .* got \(2,\) float32"),
        ({"lengths": torch.tensor([True, False])}, r"lengths must be an integer tensor .* got \(2,\) bool"),
        ({"lengths": [1, 2]}, r"lengths must be an integer tensor .* got \[1, 2\] \(list\)"),
        ({"lengths": torch.tensor([1, 2], device="meta")}, r"lengths is on meta but the tokens are on cpu"),
    ]
for op in LOSSES:
    BAD[op] += [
        ({"depth_weights": [1.0, 2.0]}, r"depth_weights must have shape \(1,\)"),
        ({"depth_weights": 1.0}, r"depth_weights must have shape \(1,\)"),
        *(({"depth_weights": value}, r"depth_weights must be 1 numbers, got") for value in ("1", ["a"], [10**400])),
        ({"depth_weights": [ZEROS((), requires_grad=True)]}, r"depth_weights must be numbers or one tensor"),
    ]


@pytest.mark.parametrize(("op", "changed", "message"), [(op, *bad) for op, calls in BAD.items() for bad in calls])
def test_a_bad_call_is_one_line(op: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        getattr(ops, op)(**{**GOOD[op], **changed})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("op", "name"), FACTORS)
def test_factors_that_no_float32_holds(op: str, name: str) -> None:
    for dtype in LOW_DTYPES:
        with pytest.raises(InputError, match=f"{name} must be a number that float32 holds"):
            call(build(op, **{name: 1e300}).to(dtype))
        with pytest.raises(InputError, match=f"{name} must be a finite number.*beyond the largest float"):
            call(build(op, **{name: 10**5000}).to(dtype))
    assert call(build(op, **{name: 1e300}))[0].dtype == torch.float64
