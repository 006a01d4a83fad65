"""For `layerwise_cross_entropy` alone, until it is two files as the other ops are."""

from cdt_fast.ops.common import PRODUCT_BYTES, add_product, budget, cpu_has_bf16_products, product_over_rows, rows_of

__all__ = ["PRODUCT_BYTES", "add_product", "budget", "cpu_has_bf16_products", "product_over_rows", "rows_of"]
