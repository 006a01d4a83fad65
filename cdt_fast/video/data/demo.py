"""A surveillance scene that is drawn, so that the first command works without any download.

A fixed camera looks at a brick wall with windows and a lettered sign, a hedge, a paved walk and a road. People walk
by at different speeds and hide each other, a car passes, a notice board and a lamp post stand in front of them, and
the light changes slowly and unevenly.

Places are in units of 1/16 pixel of a 320x320 canvas, gray levels in 1/16 of a level. The picture is drawn at twice the
resolution of the frames and averaged, which smooths the edges. All numbers are whole, so every machine draws the same.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cdt_fast.checks import InputError

_UNIT, _CANVAS, _LEVEL, _LIGHT = 16, 320, 16, 1 << 12
_WALL_BOTTOM, _WALK_BOTTOM = 132, 230
# Figures leave on one side and come back on the other after a while out of sight.
_ROUND_TRIP, _MARGIN, _CAR_ROUND_TRIP = 440 * _UNIT, 60 * _UNIT, 700 * _UNIT
# A person a row, the farthest first: place at frame 0, feet and height in pixels, speed in units a frame, and the gray
# levels of coat, trousers and skin.
_WALKERS = (
    (250, 160, 58, -13, 58, 40, 150),
    (10, 172, 64, 26, 196, 70, 170),
    (130, 186, 72, 16, 36, 104, 138),
    (330, 202, 80, -34, 126, 52, 176),
    (50, 220, 88, 10, 222, 46, 158),
)
# Five rows of three pixels a letter, most significant bit left.
_LETTERS = {"C": "74447", "D": "65556", "F": "74644", "T": "72222", "S": "74717", "O": "75557", "P": "75744"}
_LETTERS |= {"2": "71747", "4": "55711", " ": "00000"}

_Map = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of x and y: levels, or what is inside
_Box = tuple[int, int, int, int]  # left, top, right, bottom


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
    canvas = _Canvas(size)
    _draw_background(canvas, generator)
    background, delays = canvas.levels, generator.integers(-20, 21, len(_WALKERS)).tolist()
    clip = np.empty((frames, size, size), dtype=np.uint8)
    for index in range(frames):
        canvas.levels = background.copy()
        for walker, delay in zip(_WALKERS, delays, strict=True):
            _draw_walker(canvas, *walker, step=index + delay)
        _draw_foreground(canvas)
        _draw_car(canvas, 52 * index)
        quarters = canvas.levels.reshape(size, 2, size, 2)
        small = (quarters[:, 0, :, 0] + quarters[:, 0, :, 1] + quarters[:, 1, :, 0] + quarters[:, 1, :, 1]) // 4
        # Slow clouds over all of it, and a slower change along the street.
        light = _LIGHT - 160 + _wave(index, 420, 420) + _wave(index, 97, 60)
        along = canvas.x[:, ::2] * 2 - _CANVAS * _UNIT
        light = light + _wave(index + 150, 900, 500) * along // (_CANVAS * _UNIT)
        clip[index] = np.clip(small.astype(np.int64) * light // (_LIGHT * _LEVEL), 0, 255)
    return clip


class _Canvas:
    """A picture of `size` x `size` pixels while it is drawn."""

    def __init__(self, size: int) -> None:
        centers = (2 * np.arange(2 * size, dtype=np.int64) + 1) * (_CANVAS * _UNIT) // (4 * size)
        self.x, self.y = centers[None, :], centers[:, None]
        self.levels = np.zeros((2 * size, 2 * size), dtype=np.int32)

    def fill(self, bounds: _Box, level: int | _Map, inside: _Map | None = None, shade: int = 0) -> None:
        """Paint the part of a box that is `inside`: a gray level 0..255 or levels in 1/16, or what is there in 1/16."""
        left, right = np.searchsorted(self.x[0], (bounds[0], bounds[2]))
        top, bottom = np.searchsorted(self.y[:, 0], (bounds[1], bounds[3]))
        part, x, y = self.levels[top:bottom, left:right], self.x[:, left:right], self.y[top:bottom]
        if part.size:
            value = level(x, y) if callable(level) else part * shade // 16 if shade else np.int32(level * _LEVEL)
            part[:] = value if inside is None else np.where(inside(x, y), value, part)

    def box(self, left: int, top: int, right: int, bottom: int, level: int | _Map, inside: _Map | None = None) -> None:
        """Fill a box that is given in canvas pixels."""
        self.fill((left * _UNIT, top * _UNIT, right * _UNIT, bottom * _UNIT), level, inside)

    def ellipse(self, bounds: _Box, level: int | _Map, shade: int = 0) -> None:
        """Fill the ellipse that touches the four sides of a box."""
        self.fill(bounds, level, _ellipse(bounds), shade)

    def write(self, text: str, left: int, top: int, dot: int, level: int) -> None:
        """Write letters whose dots are `dot` units wide; `left` and `top` in canvas pixels."""
        for place, letter in enumerate(text):
            for row, bits in enumerate(_LETTERS[letter]):
                for column in range(3):
                    if int(bits) >> (2 - column) & 1:
                        x, y = left * _UNIT + (4 * place + column) * dot, top * _UNIT + row * dot
                        self.fill((x, y, x + dot, y + dot), level)


def _ellipse(bounds: _Box) -> _Map:
    left, top, right, bottom = bounds
    width, height = right - left, bottom - top
    return lambda x, y: (
        ((2 * x - left - right) * height) ** 2 + ((2 * y - top - bottom) * width) ** 2 <= (width * height) ** 2
    )


def _wave(position: int, period: int, height: int) -> int:
    """Return nearly a sine of whole numbers: two parabolas, -height..height."""
    half = period // 2
    turn, step = divmod(position % (2 * half), half)
    return (-1 if turn else 1) * (4 * height * step * (half - step) // (half * half))


def _noise(generator: np.random.Generator, cell: int, strength: int) -> _Map:
    """Return smooth random levels of ±`strength` gray levels, from random values `cell` pixels apart."""
    cell *= _UNIT
    across = _CANVAS * _UNIT // cell + 2
    lattice = generator.integers(-strength * _LEVEL, strength * _LEVEL + 1, (across, across))

    def levels(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        (column, right), (row, down) = np.divmod(x, cell), np.divmod(y, cell)
        upper = lattice[row, column] * (cell - right) + lattice[row, column + 1] * right
        lower = lattice[row + 1, column] * (cell - right) + lattice[row + 1, column + 1] * right
        return (upper * (cell - down) + lower * down) // (cell * cell)

    return levels


def _draw_walker(
    canvas: _Canvas, start: int, feet: int, height: int, speed: int, coat: int, trousers: int, skin: int, step: int
) -> None:
    travelled, height, ground = speed * step, height * _UNIT, feet * _UNIT
    x = (start * _UNIT + travelled + _MARGIN) % _ROUND_TRIP - _MARGIN
    # A full cycle of both legs carries the body as far as the feet can reach, so that they do not slide.
    swing = _wave(abs(travelled), height * 4 // 5, height // 6)
    bob = abs(swing) // 6
    hip, shoulder = ground - height * 9 // 20 + bob, ground - height * 4 // 5 + bob
    thick, body, lifted = height // 17, height // 9, ground - abs(swing) // 5
    canvas.ellipse((x - height // 4, ground - height // 30, x + height // 3, ground + height // 22), 0, shade=11)
    for side, tone in ((-1, trousers * 3 // 4), (1, trousers)):
        foot = x + side * swing
        _draw_limb(canvas, (x, hip), (foot, lifted), thick, tone)
        canvas.fill((foot - thick, ground - thick - abs(swing) // 5, foot + thick * 2, lifted), 24)
    _draw_limb(canvas, (x, shoulder), (x + swing * 3 // 4, hip), thick * 4 // 5, coat * 2 // 3)
    left, top, right, bottom = x - body, shoulder - thick // 2, x + body, hip + thick * 2
    # A coat with fine stripes, lighter on the side of the light.
    canvas.fill(
        (left, top, right, bottom),
        lambda x, y: (
            coat * _LEVEL - (x - left) * 24 * _LEVEL // (right - left) - (y - top) // (3 * _UNIT) % 2 * 10 * _LEVEL
        ),
        _ellipse((left, top, right, bottom + body)),
    )
    _draw_limb(canvas, (x, shoulder + thick), (x - swing * 3 // 4, hip), thick * 4 // 5, coat * 5 // 6)
    head = (x - height // 15, shoulder - height * 3 // 20, x + height // 15, shoulder)
    canvas.ellipse(head, skin)
    canvas.fill((*head[:3], head[1] + height // 16), 30, _ellipse(head))


def _draw_limb(canvas: _Canvas, upper: tuple[int, int], lower: tuple[int, int], half_width: int, level: int) -> None:
    drop, lean = max(lower[1] - upper[1], 1), lower[0] - upper[0]
    bounds = (min(upper[0], lower[0]) - half_width, upper[1], max(upper[0], lower[0]) + half_width, lower[1])
    canvas.fill(bounds, level, lambda x, y: abs(x - upper[0] - lean * (y - upper[1]) // drop) <= half_width)


def _draw_car(canvas: _Canvas, travelled: int) -> None:
    left = (travelled + 330 * _UNIT) % _CAR_ROUND_TRIP - 180 * _UNIT
    x = left // _UNIT
    canvas.ellipse(((x - 4) * _UNIT, 274 * _UNIT, (x + 136) * _UNIT, 290 * _UNIT), 0, shade=8)

    def part(start: int, top: int, end: int, bottom: int, level: int | _Map, inside: _Map | None = None) -> None:
        canvas.fill((left + start * _UNIT, top * _UNIT, left + end * _UNIT, bottom * _UNIT), level, inside)

    # The roof leans at both ends: the box is narrowed by the height above the doors.
    part(
        20,
        216,
        108,
        242,
        148,
        lambda x, y: (x - left - 20 * _UNIT > (242 * _UNIT - y) * 3 // 5) & (left + 108 * _UNIT - x > 242 * _UNIT - y),
    )
    part(36, 221, 60, 239, 40)
    part(64, 221, 86, 239, 40)
    part(0, 240, 132, 272, lambda x, y: 200 * _LEVEL + 240 * _UNIT - y)
    part(0, 254, 132, 256, 84)
    part(62, 241, 63, 271, 96)
    part(124, 246, 132, 253, 244)
    tyre, rim, y = 13 * _UNIT, 8 * _UNIT, 270 * _UNIT
    # One turn of the tyre's circumference; two waves a quarter turn apart make the spoke's direction.
    turn = tyre * 44 // 7
    across, down = _wave(travelled, turn, 64), _wave(travelled + turn // 4, turn, 64)
    for x in (left + 26 * _UNIT, left + 106 * _UNIT):
        canvas.ellipse((x - tyre, y - tyre, x + tyre, y + tyre), 26)
        bounds = (x - rim, y - rim, x + rim, y + rim)
        canvas.ellipse(bounds, 150)
        inside = _ellipse(bounds)
        canvas.fill(
            bounds,
            50,
            lambda px, py, x=x, inside=inside: (
                (abs((px - x) * down - (py - y) * across) < 120 * _UNIT) & inside(px, py)
            ),
        )


def _draw_background(canvas: _Canvas, generator: np.random.Generator) -> None:
    """Draw everything that figures pass in front of."""
    canvas.box(0, 0, _CANVAS, _WALL_BOTTOM, _bricks(generator))
    for left in (24, 262):  # windows
        canvas.box(left - 3, 19, left + 49, 91, 214)
        canvas.box(
            left, 22, left + 46, 88, lambda x, y: 46 * _LEVEL + (y // 6 + (x + y) // (18 * _UNIT) % 2 * 300) % 900
        )
        canvas.box(left + 22, 22, left + 25, 88, 205)
        canvas.box(left, 46, left + 46, 49, 205)
        canvas.box(left - 6, 91, left + 52, 96, 188)
    canvas.box(112, 26, 236, 56, 208)
    canvas.box(114, 28, 234, 54, 62)
    canvas.write("CDT FOTO 24", left=119, top=34, dot=42, level=225)
    canvas.write("POST OFF DOCS 4 FOOD TO 42", left=120, top=60, dot=16, level=35)
    canvas.box(0, _WALL_BOTTOM - 4, _CANVAS, _WALK_BOTTOM, _paving(generator))
    scales = [_noise(generator, cell, strength) for cell, strength in ((3, 34), (7, 26), (20, 14))]
    waves, twigs = _noise(generator, 26, 10), _noise(generator, 4, 7)
    canvas.box(
        *(96, 84, 250, _WALL_BOTTOM + 4),  # a hedge
        lambda x, y: np.maximum(72 * _LEVEL + sum(scale(x, y) for scale in scales), 8 * _LEVEL),
        lambda x, y: y > 98 * _UNIT + (waves(x, y * 0) + twigs(x, y)) * _UNIT // _LEVEL,
    )
    grain, patches = _noise(generator, 2, 15), _noise(generator, 40, 9)
    canvas.box(0, _WALK_BOTTOM, _CANVAS, _CANVAS, lambda x, y: 82 * _LEVEL + grain(x, y) + patches(x, y))
    canvas.box(0, _WALK_BOTTOM, _CANVAS, _WALK_BOTTOM + 5, 168)
    canvas.box(0, _WALK_BOTTOM + 5, _CANVAS, _WALK_BOTTOM + 7, 48)
    canvas.box(0, 296, _CANVAS, 301, 190, lambda x, y: x // (26 * _UNIT) % 2 == 0)


def _bricks(generator: np.random.Generator) -> _Map:
    height, width, joint = 9 * _UNIT, 21 * _UNIT, 20
    tones = generator.integers(-22, 23, (_CANVAS // 9 + 2, _CANVAS // 21 + 3)) * _LEVEL
    grain, stains = _noise(generator, 2, 9), _noise(generator, 50, 14)

    def levels(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        row = y // height
        along = x + row % 2 * (width // 2)
        mortar = (y % height < joint) | (along % width < joint)
        return np.where(mortar, 158 * _LEVEL, 116 * _LEVEL + tones[row, along // width]) + grain(x, y) + stains(x, y)

    return levels


def _paving(generator: np.random.Generator) -> _Map:
    tones = generator.integers(-14, 15, (64, 64)) * _LEVEL
    grain, dirt = _noise(generator, 3, 6), _noise(generator, 28, 9)

    def levels(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        # Seen from above the wall: stones are wider and rows are taller towards the camera.
        depth = y - 40 * _UNIT
        across, back = (x - _CANVAS * _UNIT // 2) * 4096 // depth, 60 * 4096 * _UNIT // depth
        joint = (across % 700 < 40) | (back % 220 < 14)
        stone = 172 * _LEVEL + tones[back // 220 % 64, across // 700 % 64]
        return np.where(joint, 104 * _LEVEL, stone) + grain(x, y) + dirt(x, y)

    return levels


def _draw_foreground(canvas: _Canvas) -> None:
    """Draw what hides the figures that pass behind it: a notice board and a lamp post."""
    for post in (60, 96):
        canvas.box(post, 218, post + 4, 229, 38)
    canvas.box(54, 144, 106, 219, 44)
    canvas.box(57, 147, 103, 216, 196)
    canvas.write("STOP", left=62, top=152, dot=36, level=30)
    # Rows of short dashes: lettering too small to read.
    canvas.box(
        *(61, 170, 99, 212, 70),
        lambda x, y: (y // (3 * _UNIT) % 2 == 0) & ((x * 7 + y // (3 * _UNIT) * 53) % 97 < 62),
    )
    canvas.box(216, 14, 223, 227, 84)
    canvas.box(217, 14, 219, 227, 140)
    canvas.box(211, 214, 228, 229, 58)
    canvas.box(196, 8, 243, 16, 52)
