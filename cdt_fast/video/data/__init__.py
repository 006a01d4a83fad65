"""Video as clean windows of frames, patches, and generated scenes."""

from cdt_fast.video.data.clips import open_source
from cdt_fast.video.data.patches import from_patches, to_patches

__all__ = ["from_patches", "open_source", "to_patches"]
