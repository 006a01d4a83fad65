"""The models whose every depth can be read; installed as `cdt_fast.models`."""

from cdt_fast.models.denoising_dust import DenoisingDUST
from cdt_fast.models.dust import DUST, VideoUT
from cdt_fast.models.pretrained import PretrainedModel, load_pretrained
from cdt_fast.models.text_ut import TextUT
from cdt_fast.models.vit import DenoisingViT

__all__ = ["DUST", "DenoisingDUST", "DenoisingViT", "PretrainedModel", "TextUT", "VideoUT", "load_pretrained"]
