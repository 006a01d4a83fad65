"""Video as clean windows of frames, patches, and generated scenes."""

from cdt_fast.video.data.clips import find_clips, open_source
from cdt_fast.video.data.crops import from_opponent, to_opponent
from cdt_fast.video.data.patches import from_patches, to_patches
from cdt_fast.video.data.scenes import demo_clip
from cdt_fast.video.data.source import FrameSource
from cdt_fast.video.data.windows import VideoData, Windows, load_video

__all__ = [
    "FrameSource",
    "VideoData",
    "Windows",
    "demo_clip",
    "find_clips",
    "from_opponent",
    "from_patches",
    "load_video",
    "open_source",
    "to_opponent",
    "to_patches",
]
