"""Losses at every depth of a pretrained transformer, read through its own final norm, pooling and head.

The files, in the order in which data flows through them:

1. `layout.py` finds the layers, what follows the last one, and the head, whose weight and bias all depths share.
2. `wrapping.py` puts a function in the place of the model's forward, which is called from then on.
3. `reading.py` runs the model's own, where hooks collect the states between the layers: what the head is given of each.
4. `outputs.py` turns labels into targets, and adds the losses to the model's output.
5. `attach.py` puts these together, and forms the losses of all depths in one fused pass.
6. `check.py` compares the first forward with the model itself: a loss that is wrong there is refused, and never silent;
   it cannot see a module before the head that is the identity at that moment, nor a loss term of training alone, unless
   that forward is in training mode and the outermost module adds it.
"""

from cdt_fast.models.layer_losses.attach import LayerLosses, attach_layer_losses

__all__ = ["LayerLosses", "attach_layer_losses"]
