"""The models whose every depth can be read; installed as `cdt_fast.models`."""

from cdt_fast.models.dust import DUST
from cdt_fast.models.pretrained import PretrainedModel, load_pretrained
from cdt_fast.models.ut import VideoUT

__all__ = ["DUST", "PretrainedModel", "VideoUT", "load_pretrained"]
