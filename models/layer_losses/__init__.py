"""Losses at every depth of a pretrained transformer, through the head that it has."""

from cdt_fast.models.layer_losses.attach import attach_layer_losses
from cdt_fast.models.layer_losses.decoding.tuning import frequent_tokens
from cdt_fast.models.layer_losses.handle import LayerLosses
from cdt_fast.models.layer_losses.overhead import predicted_overhead, predicted_speedup

__all__ = ["LayerLosses", "attach_layer_losses", "frequent_tokens", "predicted_overhead", "predicted_speedup"]
