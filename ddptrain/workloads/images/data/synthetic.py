"""`source: builtin`: synthetic images of shapes, drawn on request, so that a first run needs no data."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ddptrain.storage.sources import open_source
from ddptrain.storage.store import BUILTIN, UNKNOWN_SIZE, Limits, Listed, Location, NotFound, Source

if TYPE_CHECKING:
    from PIL import ImageDraw

SHAPES = ("circle", "cross", "ring", "square", "star", "triangle")
EACH = 100
SIZE = 48  # pixels
_DARK, _LIGHT = 90, 150  # the lightest background, and the darkest shape

Point = tuple[float, float]
Colour = tuple[int, int, int]


def open_images(location: Location, limits: Limits) -> Source:
    """Open a source of images in this process; see open_source()."""
    return SyntheticImages(location) if location.protocol == BUILTIN else open_source(location, limits)


class SyntheticImages(Source):
    """The images as a source; a key is, for example, circle/000.png."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self._keys = {f"{shape}/{number:03d}.png" for shape in SHAPES for number in range(EACH)}

    def listing(self, folder: str = "") -> Iterator[Listed]:
        """Yield every image."""
        return (Listed(key, UNKNOWN_SIZE, "") for key in sorted(self._keys))

    def get(self, key: str, *, start: int = 0, limit_bytes: int | None = None) -> bytes:
        """Return an image as a PNG; a key always stands for the same image. Raises NotFound."""
        if key not in self._keys:
            raise NotFound(key)
        return _drawn(key)

    def chunks(self, key: str) -> Iterator[bytes]:
        """See Source."""
        yield self.get(key)


def _drawn(key: str) -> bytes:
    from PIL import Image, ImageDraw

    shape = key.partition("/")[0]
    chance = random.Random(key)  # the same images on every machine
    image = Image.new("RGB", (SIZE, SIZE), _colour(chance, 0, _DARK))
    radius = chance.uniform(0.25, 0.45) * SIZE
    centre = (chance.uniform(radius, SIZE - radius), chance.uniform(radius, SIZE - radius))
    turn = chance.uniform(0, 2 * math.pi)
    _DRAW[shape](ImageDraw.Draw(image), centre, radius, turn, _colour(chance, _LIGHT, 255))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _colour(chance: random.Random, low: int, high: int) -> Colour:
    return chance.randint(low, high), chance.randint(low, high), chance.randint(low, high)


def _around(centre: Point, radius: float, angle: float) -> Point:
    return centre[0] + radius * math.cos(angle), centre[1] + radius * math.sin(angle)


def _polygon(corners: int, inner: float) -> Callable[[ImageDraw.ImageDraw, Point, float, float, Colour], None]:
    """Return a function that draws a polygon; its edges bend inwards to the share `inner` of the radius."""

    def draw_it(pen: ImageDraw.ImageDraw, centre: Point, radius: float, turn: float, colour: Colour) -> None:
        step = math.pi / corners
        pen.polygon(
            [_around(centre, radius * (inner if k % 2 else 1), turn + k * step) for k in range(2 * corners)],
            fill=colour,
        )

    return draw_it


def _circle(pen: ImageDraw.ImageDraw, centre: Point, radius: float, _turn: float, colour: Colour) -> None:
    x, y = centre
    pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)


def _ring(pen: ImageDraw.ImageDraw, centre: Point, radius: float, _turn: float, colour: Colour) -> None:
    x, y = centre
    pen.ellipse((x - radius, y - radius, x + radius, y + radius), outline=colour, width=max(3, round(radius / 3)))


def _cross(pen: ImageDraw.ImageDraw, centre: Point, radius: float, turn: float, colour: Colour) -> None:
    for angle in (turn, turn + math.pi / 2):
        ends = (_around(centre, radius, angle), _around(centre, -radius, angle))
        pen.line(ends, fill=colour, width=max(3, round(radius / 3)))


_DRAW = {
    "circle": _circle,
    "cross": _cross,
    "ring": _ring,
    "square": _polygon(4, math.cos(math.pi / 4)),
    "star": _polygon(5, 0.4),
    "triangle": _polygon(3, math.cos(math.pi / 3)),
}
