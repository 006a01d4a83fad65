"""What stands still in the demo clip: wall, window, sign, hedge, walk and road, and the things in front."""

from __future__ import annotations

import numpy as np

from cdt_fast.video.data.demo_canvas import CANVAS, LEVEL, UNIT, Canvas, Mask, box, noise

_WALL_BOTTOM = 132
_WALK_BOTTOM = 230

# Five rows of three pixels a letter, most significant bit left.
_LETTERS = {
    "C": (7, 4, 4, 4, 7),
    "D": (6, 5, 5, 5, 6),
    "F": (7, 4, 6, 4, 4),
    "T": (7, 2, 2, 2, 2),
    "S": (7, 4, 7, 1, 7),
    "O": (7, 5, 5, 5, 7),
    "P": (7, 5, 7, 4, 4),
    "2": (7, 1, 7, 4, 7),
    "4": (5, 5, 7, 1, 1),
    " ": (0, 0, 0, 0, 0),
}


def draw_background(canvas: Canvas, generator: np.random.Generator) -> None:
    """Draw everything that figures pass in front of."""
    canvas.fill(box(0, 0, CANVAS, _WALL_BOTTOM), _bricks(generator))
    _draw_window(canvas, left=24)
    _draw_window(canvas, left=262)
    canvas.fill(box(112, 26, 236, 56), 208)
    canvas.fill(box(114, 28, 234, 54), 62)
    _write(canvas, "CDT FOTO 24", left=119, top=34, dot=42, level=225)
    _write(canvas, "POST OFF DOCS 4 FOOD TO 42", left=120, top=60, dot=16, level=35)
    canvas.fill(box(0, _WALL_BOTTOM - 4, CANVAS, _WALK_BOTTOM), _paving(generator))
    canvas.fill(box(96, 84, 250, _WALL_BOTTOM + 4), _leaves(generator), _hedge_outline(generator))
    canvas.fill(box(0, _WALK_BOTTOM, CANVAS, CANVAS), _asphalt(generator))
    canvas.fill(box(0, _WALK_BOTTOM, CANVAS, _WALK_BOTTOM + 5), 168)
    canvas.fill(box(0, _WALK_BOTTOM + 5, CANVAS, _WALK_BOTTOM + 7), 48)
    canvas.fill(box(0, 296, CANVAS, 301), 190, lambda x, y: x // (26 * UNIT) % 2 == 0)


def draw_foreground(canvas: Canvas) -> None:
    """Draw what hides the figures that pass behind it: a notice board and a lamp post."""
    for post in (60, 96):
        canvas.fill(box(post, 218, post + 4, 229), 38)
    canvas.fill(box(54, 144, 106, 219), 44)
    canvas.fill(box(57, 147, 103, 216), 196)
    _write(canvas, "STOP", left=62, top=152, dot=36, level=30)
    # Rows of short dashes: lettering too small to read.
    canvas.fill(
        box(61, 170, 99, 212), 70, lambda x, y: (y // (3 * UNIT) % 2 == 0) & ((x * 7 + y // (3 * UNIT) * 53) % 97 < 62)
    )
    canvas.fill(box(216, 14, 223, 227), 84)
    canvas.fill(box(217, 14, 219, 227), 140)
    canvas.fill(box(211, 214, 228, 229), 58)
    canvas.fill(box(196, 8, 243, 16), 52)


def _bricks(generator: np.random.Generator) -> Mask:
    height, width, joint = 9 * UNIT, 21 * UNIT, 20
    tones = generator.integers(-22, 23, (CANVAS // 9 + 2, CANVAS // 21 + 3)) * LEVEL
    grain, stains = noise(generator, 2 * UNIT, 9), noise(generator, 50 * UNIT, 14)

    def levels(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        row = y // height
        along = x + row % 2 * (width // 2)
        mortar = (y % height < joint) | (along % width < joint)
        brick = 116 * LEVEL + tones[row, along // width]
        return np.where(mortar, 158 * LEVEL, brick) + grain(x, y) + stains(x, y)

    return levels


def _paving(generator: np.random.Generator) -> Mask:
    tones = generator.integers(-14, 15, (64, 64)) * LEVEL
    grain, dirt = noise(generator, 3 * UNIT, 6), noise(generator, 28 * UNIT, 9)

    def levels(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        # Seen from above the wall: stones are wider and rows are taller towards the camera.
        depth = y - 40 * UNIT
        across = (x - CANVAS * UNIT // 2) * 4096 // depth
        back = 60 * 4096 * UNIT // depth
        joint = (across % 700 < 40) | (back % 220 < 14)
        stone = 172 * LEVEL + tones[back // 220 % 64, across // 700 % 64]
        return np.where(joint, 104 * LEVEL, stone) + grain(x, y) + dirt(x, y)

    return levels


def _asphalt(generator: np.random.Generator) -> Mask:
    grain, patches = noise(generator, 2 * UNIT, 15), noise(generator, 40 * UNIT, 9)
    return lambda x, y: 82 * LEVEL + grain(x, y) + patches(x, y)


def _leaves(generator: np.random.Generator) -> Mask:
    scales = [noise(generator, cell * UNIT, strength) for cell, strength in ((3, 34), (7, 26), (20, 14))]
    return lambda x, y: np.maximum(72 * LEVEL + sum(scale(x, y) for scale in scales), 8 * LEVEL)


def _hedge_outline(generator: np.random.Generator) -> Mask:
    waves, twigs = noise(generator, 26 * UNIT, 10), noise(generator, 4 * UNIT, 7)
    return lambda x, y: y > 98 * UNIT + (waves(x, y * 0) + twigs(x, y)) * UNIT // LEVEL


def _draw_window(canvas: Canvas, left: int) -> None:
    top, width, height = 22, 46, 66
    canvas.fill(box(left - 3, top - 3, left + width + 3, top + height + 3), 214)
    canvas.fill(
        box(left, top, left + width, top + height),
        lambda x, y: 46 * LEVEL + (y // 6 + (x + y) // (18 * UNIT) % 2 * 300) % 900,
    )
    canvas.fill(box(left + width // 2 - 1, top, left + width // 2 + 2, top + height), 205)
    canvas.fill(box(left, top + 24, left + width, top + 27), 205)
    canvas.fill(box(left - 6, top + height + 3, left + width + 6, top + height + 8), 188)


def _write(canvas: Canvas, text: str, left: int, top: int, dot: int, level: int) -> None:
    """Letters whose dots are `dot` units wide; `left` and `top` in canvas pixels."""
    x, y = left * UNIT, top * UNIT
    for letter in text:
        for row, bits in enumerate(_LETTERS[letter]):
            for column in range(3):
                if bits >> (2 - column) & 1:
                    corner = (x + column * dot, y + row * dot)
                    canvas.fill((*corner, corner[0] + dot, corner[1] + dot), level)
        x += 4 * dot
