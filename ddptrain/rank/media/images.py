"""Converts tensors, arrays and PIL images to PNG."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

_COMPRESS_LEVEL = 1  # zlib's fastest level, because the training step waits
_MODES = ("L", "RGB", "RGBA")
_DEPTHS = (1, 3, 4)


def is_image(value: Any) -> bool:
    """Return whether the value is a PIL image, or a tensor or array with at least two dimensions."""
    return isinstance(value, Image.Image) or (hasattr(value, "ndim") and value.ndim >= 2)


def png(image: Any) -> bytes:
    """Encode an image as PNG.

    `image` is a tensor [3, H, W], [1, H, W] or [H, W], an array [H, W, 3], [H, W, 1] or [H, W], or a PIL image. Tensors
    and arrays are uint8, or floats from 0 to 1 (values outside are clipped, NaN becomes 0).

    Raises:
        TypeError: `image` is none of these.
        ValueError: it has another shape.
    """
    pil_image = image if isinstance(image, Image.Image) else _to_pil(image)
    if pil_image.mode not in _MODES:
        pil_image = pil_image.convert("RGBA" if "A" in pil_image.mode or "transparency" in pil_image.info else "RGB")
    file = io.BytesIO()
    pil_image.save(file, "PNG", compress_level=_COMPRESS_LEVEL)
    return file.getvalue()


def _to_pil(image: Any) -> Image.Image:
    is_tensor = hasattr(image, "detach")
    array: Any = image.detach().cpu() if is_tensor else image
    if not is_tensor and not isinstance(image, np.ndarray):
        raise TypeError(f"an image is a tensor, a numpy array or a PIL image, not {type(image).__name__}")
    if is_tensor:
        array = (array.float() if array.is_floating_point() else array).numpy()  # numpy has no bfloat16
    if array.ndim == 3 and is_tensor:
        array = np.moveaxis(array, 0, -1)
    if array.ndim not in (2, 3) or 0 in array.shape or (array.ndim == 3 and array.shape[2] not in _DEPTHS):
        wanted = "[3, H, W], [1, H, W] or [H, W]" if is_tensor else "[H, W, 3], [H, W, 1] or [H, W]"
        what = "a tensor" if is_tensor else "an array"
        raise ValueError(f"{what} that is an image has the shape {wanted}, not {list(image.shape)}")
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(_bytes(array)))


def _bytes(array: Any) -> Any:
    """Return the values as uint8, 0 to 255."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    if not np.issubdtype(array.dtype, np.floating):
        raise TypeError(f"an image is of uint8, or of floats from 0 to 1, not of {array.dtype}")
    return np.rint(np.clip(np.nan_to_num(array, nan=0.0), 0.0, 1.0) * 255).astype(np.uint8)
