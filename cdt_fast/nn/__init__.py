"""The ops as modules, for networks that are put together from layers: `cdt.nn.SymmetricAttention` and so on.

Each holds the parameters and the options of one op of `cdt_fast.ops`, which does the work and documents it.
"""

from cdt_fast.nn.layers import LISTAStep, ResidualLinear, SoftThreshold, SymmetricAttention, UnrolledLayer
from cdt_fast.nn.losses import LayerwiseCrossEntropy, LayerwiseReconstructionLoss

__all__ = [
    "LISTAStep",
    "LayerwiseCrossEntropy",
    "LayerwiseReconstructionLoss",
    "ResidualLinear",
    "SoftThreshold",
    "SymmetricAttention",
    "UnrolledLayer",
]
