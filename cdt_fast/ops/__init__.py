"""The ops: public functions with their formulas beside them, usable from any torch model.

Each op works in any float dtype, on any strides, under autograd and autocast. Its reference, the written-out formula
that the tests believe, is the function of the same name with `_reference` in the op's own module.
"""

from cdt_fast.ops.common import use_backend
from cdt_fast.ops.denoising_layer import denoising_layer
from cdt_fast.ops.layerwise_cross_entropy import HeadShard, layerwise_cross_entropy
from cdt_fast.ops.layerwise_reconstruction_loss import layerwise_reconstruction_loss
from cdt_fast.ops.lista_step import lista_step
from cdt_fast.ops.residual_linear import residual_linear
from cdt_fast.ops.soft_threshold import soft_threshold
from cdt_fast.ops.symmetric_attention import symmetric_attention
from cdt_fast.ops.unrolled_layer import unrolled_layer

__all__ = ["HeadShard", "denoising_layer", "layerwise_cross_entropy", "layerwise_reconstruction_loss", "lista_step"]
__all__ += ["residual_linear", "soft_threshold", "symmetric_attention", "unrolled_layer", "use_backend"]
