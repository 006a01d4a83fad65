"""Losses at every depth of a pretrained transformer, through the head that it has."""

from cdt_fast.models.layer_losses.attach import attach_layer_losses
from cdt_fast.models.layer_losses.handle import LayerLosses

__all__ = ["LayerLosses", "attach_layer_losses"]
