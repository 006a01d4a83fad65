"""Video as clean windows of frames, patches, noise; public data sets and a generated demo clip."""

from cdt_fast.data.cache import load_clip
from cdt_fast.data.check import check, describe_check
from cdt_fast.data.demo import demo_clip
from cdt_fast.data.fetch import DATASETS, fetch
from cdt_fast.data.frames import open_source
from cdt_fast.data.noise import add_noise
from cdt_fast.data.patches import from_patches, to_patches
from cdt_fast.data.source import FrameSource
from cdt_fast.data.trees import Clip, find_clips
from cdt_fast.data.windows import VideoData, Windows, load_video

__all__ = [
    "DATASETS",
    "Clip",
    "FrameSource",
    "VideoData",
    "Windows",
    "add_noise",
    "check",
    "demo_clip",
    "describe_check",
    "fetch",
    "find_clips",
    "from_patches",
    "load_clip",
    "load_video",
    "open_source",
    "to_patches",
]
