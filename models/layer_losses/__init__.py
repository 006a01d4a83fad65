"""Losses at every depth of a pretrained transformer, read through its own final norm, pooling and head.

Read the files in the order in which data flows through them:

1. `layout.py` finds the modules of a model that matter: its layers, what follows the last one, and the head, whose
   weight and bias all depths share.
2. `wrapping.py` puts a function in the place of the model's forward, which is called from then on.
3. `reading.py` runs the model's own forward, in which hooks collect the states between the layers, and turns each
   state into the features that the head is given.
4. `outputs.py` turns labels into targets, and adds the losses to the model's output.
5. `attach.py` puts these together: `attach_layer_losses` and the wrapped forward, whose `_losses` forms the losses of
   all depths in one fused pass.
6. `check.py` compares the first forward with the model itself: a wrong loss is refused, and never silent.
"""

from cdt_fast.models.layer_losses.attach import LayerLosses, attach_layer_losses

__all__ = ["LayerLosses", "attach_layer_losses"]
