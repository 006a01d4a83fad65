"""A surveillance scene that is drawn, so that the first command works without any download.

A fixed camera looks at a brick wall with windows and a lettered sign, a hedge, a paved walk and a road. People walk
by at different speeds and hide each other, a car passes, a notice board and a lamp post stand in front of them, and
the light changes slowly and unevenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from cdt_fast.errors import InputError
from cdt_fast.video.data.demo_canvas import CANVAS, LEVEL, UNIT, Canvas, Mask, box, ellipse, noise

DEMO_FRAME_RATE = Fraction(12)

# Figures leave on one side and come back on the other after a while out of sight.
_ROUND_TRIP = 440 * UNIT
_MARGIN = 60 * UNIT
_CAR_ROUND_TRIP = 700 * UNIT
_LIGHT_ONE = 1 << 12

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


@dataclass(frozen=True)
class _Walker:
    """A person: place of the feet at frame 0 and height in canvas pixels, speed in units a frame, gray levels."""

    start: int
    feet: int
    speed: int
    height: int
    coat: int
    trousers: int
    skin: int


# In the order of drawing, the farthest first.
_WALKERS = (
    _Walker(start=250, feet=160, speed=-13, height=58, coat=58, trousers=40, skin=150),
    _Walker(start=10, feet=172, speed=26, height=64, coat=196, trousers=70, skin=170),
    _Walker(start=130, feet=186, speed=16, height=72, coat=36, trousers=104, skin=138),
    _Walker(start=330, feet=202, speed=-34, height=80, coat=126, trousers=52, skin=176),
    _Walker(start=50, feet=220, speed=10, height=88, coat=222, trousers=46, skin=158),
)


def demo_clip(frames: int = 240, size: int = 160, seed: int = 0) -> np.ndarray:
    """Draw the demo clip.

    Args:
        frames: how many frames to draw.
        size: height and width of a frame in pixels.
        seed: of the textures and of where the figures start.

    Returns:
        uint8 [frames, size, size], 0..255. The same arguments give the same bytes on every machine.

    Raises:
        InputError: `frames` or `size` is less than 1.
    """
    if frames < 1 or size < 1:
        raise InputError(f"frames is {frames} and size is {size}; expected at least 1 for both")
    generator = np.random.Generator(np.random.PCG64(seed))
    background = Canvas(size)
    _draw_background(background, generator)
    delays = generator.integers(-20, 21, len(_WALKERS)).tolist()
    clip = np.empty((frames, size, size), dtype=np.uint8)
    for index in range(frames):
        canvas = background.copy()
        for walker, delay in zip(_WALKERS, delays, strict=True):
            _draw_walker(canvas, walker, walker.speed * (index + delay))
        _draw_foreground(canvas)
        _draw_car(canvas, 52 * index)
        lit = canvas.levels_at_size().astype(np.int64) * _light(canvas, index) // (_LIGHT_ONE * LEVEL)
        clip[index] = np.clip(lit, 0, 255)
    return clip


def _light(canvas: Canvas, index: int) -> np.ndarray:
    """Brightness along x, `_LIGHT_ONE` for one: slow clouds over all of it and a slower change along the street."""
    overall = _wave(index, 420, 420) + _wave(index, 97, 60)
    slope = _wave(index + 150, 900, 500)
    along = canvas.x[:, ::2] * 2 - CANVAS * UNIT
    return _LIGHT_ONE - 160 + overall + slope * along // (CANVAS * UNIT)


def _draw_walker(canvas: Canvas, walker: _Walker, travelled: int) -> None:
    x = (walker.start * UNIT + travelled + _MARGIN) % _ROUND_TRIP - _MARGIN
    height, ground = walker.height * UNIT, walker.feet * UNIT
    # A full cycle of both legs carries the body as far as the feet can reach, so that they do not slide.
    swing = _wave(abs(travelled), height * 4 // 5, height // 6)
    bob = abs(swing) // 6
    hip, shoulder = ground - height * 9 // 20 + bob, ground - height * 4 // 5 + bob
    thick, body = height // 17, height // 9
    canvas.shade((x - height // 4, ground - height // 30, x + height // 3, ground + height // 22), 11)
    for side, tone in ((-1, walker.trousers * 3 // 4), (1, walker.trousers)):
        _limb(canvas, (x, hip), (x + side * swing, ground - abs(swing) // 5), thick, tone)
        foot = x + side * swing
        canvas.fill((foot - thick, ground - thick - abs(swing) // 5, foot + thick * 2, ground - abs(swing) // 5), 24)
    _limb(canvas, (x, shoulder), (x + swing * 3 // 4, hip), thick * 4 // 5, walker.coat * 2 // 3)
    torso = (x - body, shoulder - thick // 2, x + body, hip + thick * 2)
    canvas.fill(torso, _cloth(walker.coat, torso), ellipse((torso[0], torso[1], torso[2], torso[3] + body)))
    _limb(canvas, (x, shoulder + thick), (x - swing * 3 // 4, hip), thick * 4 // 5, walker.coat * 5 // 6)
    head = (x - height // 15, shoulder - height * 3 // 20, x + height // 15, shoulder)
    canvas.fill(head, walker.skin, ellipse(head))
    canvas.fill((head[0], head[1], head[2], head[1] + height // 16), 30, ellipse(head))


def _cloth(coat: int, torso: tuple[int, int, int, int]) -> Mask:
    """A coat with fine stripes, lighter on the side of the light."""
    left, top, right, _ = torso
    return lambda x, y: (
        coat * LEVEL - (x - left) * 24 * LEVEL // (right - left) - (y - top) // (3 * UNIT) % 2 * 10 * LEVEL
    )


def _limb(canvas: Canvas, upper: tuple[int, int], lower: tuple[int, int], half_width: int, level: int) -> None:
    """A band from a point down to another; both in units."""
    drop = max(lower[1] - upper[1], 1)
    lean = lower[0] - upper[0]
    bounds = (
        min(upper[0], lower[0]) - half_width,
        upper[1],
        max(upper[0], lower[0]) + half_width,
        lower[1],
    )
    canvas.fill(bounds, level, lambda x, y: abs(x - upper[0] - lean * (y - upper[1]) // drop) <= half_width)


def _draw_car(canvas: Canvas, travelled: int) -> None:
    left = (travelled + 330 * UNIT) % _CAR_ROUND_TRIP - 180 * UNIT
    x, ground = left // UNIT, 282
    canvas.shade(box(x - 4, ground - 8, x + 136, ground + 8), 8)
    # The roof leans at both ends: the box is narrowed by the height above the doors.
    canvas.fill(
        (left + 20 * UNIT, 216 * UNIT, left + 108 * UNIT, 242 * UNIT),
        148,
        lambda x, y: (x - left - 20 * UNIT > (242 * UNIT - y) * 3 // 5) & (left + 108 * UNIT - x > 242 * UNIT - y),
    )
    for start, end in ((36, 60), (64, 86)):
        canvas.fill((left + start * UNIT, 221 * UNIT, left + end * UNIT, 239 * UNIT), 40)
    canvas.fill((left, 240 * UNIT, left + 132 * UNIT, 272 * UNIT), lambda x, y: 200 * LEVEL + 240 * UNIT - y)
    canvas.fill((left, 254 * UNIT, left + 132 * UNIT, 256 * UNIT), 84)
    canvas.fill((left + 62 * UNIT, 241 * UNIT, left + 63 * UNIT, 271 * UNIT), 96)
    canvas.fill((left + 124 * UNIT, 246 * UNIT, left + 132 * UNIT, 253 * UNIT), 244)
    for axle in (26, 106):
        _draw_wheel(canvas, left + axle * UNIT, 270 * UNIT, travelled)


def _draw_wheel(canvas: Canvas, x: int, y: int, travelled: int) -> None:
    tyre, rim = 13 * UNIT, 8 * UNIT
    canvas.fill((x - tyre, y - tyre, x + tyre, y + tyre), 26, ellipse((x - tyre, y - tyre, x + tyre, y + tyre)))
    bounds = (x - rim, y - rim, x + rim, y + rim)
    canvas.fill(bounds, 150, ellipse(bounds))
    # One turn of the tyre's circumference; two waves a quarter turn apart make the spoke's direction.
    turn = tyre * 44 // 7
    across, down = _wave(travelled, turn, 64), _wave(travelled + turn // 4, turn, 64)
    rim_inside = ellipse(bounds)
    canvas.fill(bounds, 50, lambda px, py: (abs((px - x) * down - (py - y) * across) < 120 * UNIT) & rim_inside(px, py))


def _wave(position: int, period: int, height: int) -> int:
    """Nearly a sine of whole numbers: two parabolas, -height..height."""
    half = period // 2
    step = position % (2 * half)
    sign = 1 if step < half else -1
    step %= half
    return sign * (4 * height * step * (half - step) // (half * half))


def _draw_background(canvas: Canvas, generator: np.random.Generator) -> None:
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


def _draw_foreground(canvas: Canvas) -> None:
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
