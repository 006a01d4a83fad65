"""A canvas of whole numbers for the demo clip.

Places are in units of 1/16 pixel of a 320x320 canvas, gray levels in 1/16 of a level. The picture is drawn at twice
the resolution of the frames and averaged, which smooths the edges. No operation depends on rounding in floating
point, so every machine draws the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

UNIT = 16
CANVAS = 320
LEVEL = 16

Mask = Callable[[np.ndarray, np.ndarray], np.ndarray]
Box = tuple[int, int, int, int]


class Canvas:
    """A picture of `size` x `size` pixels while it is drawn.

    Args:
        size: height and width of the finished picture in pixels.
        levels: int32 [2·size, 2·size], a picture to draw on; by default black.
    """

    def __init__(self, size: int, levels: np.ndarray | None = None) -> None:
        self.size = size
        pixels = 2 * size
        centers = (2 * np.arange(pixels, dtype=np.int64) + 1) * (CANVAS * UNIT) // (2 * pixels)
        self.x = centers[None, :]
        self.y = centers[:, None]
        self.levels = np.zeros((pixels, pixels), dtype=np.int32) if levels is None else levels

    def copy(self) -> Canvas:
        return Canvas(self.size, self.levels.copy())

    def fill(self, bounds: Box, level: int | Mask, inside: Mask | None = None) -> None:
        """Paint the part of a box (left, top, right, bottom, in units) that is `inside`.

        `level` is a gray level 0..255, or a function of x and y that gives levels in 1/16.
        """
        part, x, y = self._part(bounds)
        if part.size == 0:
            return
        value = level(x, y) if callable(level) else np.int32(level * LEVEL)
        part[:] = value if inside is None else np.where(inside(x, y), value, part)

    def shade(self, bounds: Box, sixteenths: int) -> None:
        """Multiply the ellipse in a box by sixteenths."""
        part, x, y = self._part(bounds)
        if part.size:
            part[:] = np.where(ellipse(bounds)(x, y), part * sixteenths // 16, part)

    def levels_at_size(self) -> np.ndarray:
        """The average of each 2 x 2 block, int32 [size, size], in 1/16 of a gray level."""
        blocks = self.levels.reshape(self.size, 2, self.size, 2)
        return (blocks[:, 0, :, 0] + blocks[:, 0, :, 1] + blocks[:, 1, :, 0] + blocks[:, 1, :, 1]) // 4

    def _part(self, bounds: Box) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        left, right = np.searchsorted(self.x[0], (bounds[0], bounds[2]))
        top, bottom = np.searchsorted(self.y[:, 0], (bounds[1], bounds[3]))
        return self.levels[top:bottom, left:right], self.x[:, left:right], self.y[top:bottom]


def box(left: int, top: int, right: int, bottom: int) -> Box:
    """A box given in canvas pixels."""
    return left * UNIT, top * UNIT, right * UNIT, bottom * UNIT


def ellipse(bounds: Box) -> Mask:
    """The ellipse that touches the four sides of a box (in units)."""
    left, top, right, bottom = bounds
    width, height = right - left, bottom - top

    def inside(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        across = (2 * x - left - right) * height
        down = (2 * y - top - bottom) * width
        return across * across + down * down <= (width * height) ** 2

    return inside


def noise(generator: np.random.Generator, cell: int, strength: int) -> Mask:
    """Smooth random levels of ±`strength` gray levels, from random values `cell` units apart."""
    across = CANVAS * UNIT // cell + 2
    lattice = generator.integers(-strength * LEVEL, strength * LEVEL + 1, (across, across))

    def levels(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        column, row = x // cell, y // cell
        right, down = x % cell, y % cell
        upper = lattice[row, column] * (cell - right) + lattice[row, column + 1] * right
        lower = lattice[row + 1, column] * (cell - right) + lattice[row + 1, column + 1] * right
        return (upper * (cell - down) + lower * down) // (cell * cell)

    return levels
