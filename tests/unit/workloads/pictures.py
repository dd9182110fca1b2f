"""Images of one colour. They need no torch, whose import takes 2 s."""

from __future__ import annotations

import io

from PIL import Image

COLOURS = {"blue": (20, 30, 220), "green": (30, 200, 20), "red": (220, 20, 30)}


def picture(colour: str, size: tuple[int, int] = (40, 30), form: str = "PNG") -> bytes:
    """An image of one colour."""
    data = io.BytesIO()
    Image.new("RGB", size, COLOURS[colour]).save(data, form)
    return data.getvalue()
