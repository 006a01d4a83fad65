"""Losses at every depth of a pretrained transformer, through the head that it has.

`attach.py` is the forward that replaces the model's, `reading.py` what it reads at each depth, `layout.py` finds the
modules, `head.py` the weight of the head, `check.py` compares the first forward with the model itself, `outputs.py` has
labels and outputs.
"""

from cdt_fast.models.layer_losses.attach import LayerLosses, attach_layer_losses

__all__ = ["LayerLosses", "attach_layer_losses"]
