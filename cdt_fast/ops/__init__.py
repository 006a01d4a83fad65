"""The ops: public functions with their formulas beside them, usable from any torch model.

Each op works in any float dtype, on any strides, under autograd and autocast. Its reference, the written-out formula
that the tests believe, is the function of the same name with `_reference` in the op's own module.
"""

from cdt_fast.ops.attention import symmetric_attention
from cdt_fast.ops.backend import use_backend
from cdt_fast.ops.cross_entropy import layerwise_cross_entropy
from cdt_fast.ops.lista import lista_step
from cdt_fast.ops.reconstruction import layerwise_reconstruction_loss
from cdt_fast.ops.residual_linear import residual_linear
from cdt_fast.ops.shrinkage import soft_threshold
from cdt_fast.ops.unrolled import unrolled_layer

__all__ = [
    "layerwise_cross_entropy",
    "layerwise_reconstruction_loss",
    "lista_step",
    "residual_linear",
    "soft_threshold",
    "symmetric_attention",
    "unrolled_layer",
    "use_backend",
]
