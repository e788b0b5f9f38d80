"""Pictures as files, decoded once into uint8 columns; into a memory-mapped file where they are many."""

from __future__ import annotations

import hashlib
import math
import os
import struct
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps

from dpfed.errors import InputError
from dpfed.flat import Records
from dpfed.tasks.folders import files_of, subfolders

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
MOST_PIXELS = 50_000_000
Picture = tuple[Path, int]  # and its label


def read_image_folder(
    folder: str | Path, *, size: int | None = None, channels: Literal[1, 3] = 3, store: str | Path | None = None
) -> Records:
    """Pictures (png, jpg, webp) in a folder per class; ``y`` numbers the folders by name, or by number where all are numbers.

    Args:
        folder: it holds one folder a class.
        size: side in pixels to which pictures are fitted (cropped to a square about the centre, then resized); without it all
            must have one size.
        channels: 3 for colours, 1 for grey.
        store: a folder for the decoded pixels. They are then memory-mapped, for more pictures than fit into memory, and not
            decoded again as long as names, sizes and times of the files are the same.
    """
    if size is not None and not 1 <= size <= 4096:
        raise InputError(f"size: must lie between 1 and 4096 pixels, got {size}. Take what the model takes.")
    if channels not in (1, 3):
        raise InputError(f"channels: must be 3 (colours) or 1 (grey), got {channels}. Take what the model takes.")
    classes = subfolders(Path(folder))
    pictures = [(path, c) for c, part in enumerate(classes) for path in files_of(part, SUFFIXES)]
    empty = [part.name for c, part in enumerate(classes) if not any(c == label for _, label in pictures)] if classes else []
    if not classes or empty:
        lacking = f"its folder '{empty[0]}' holds no picture" if empty else "it holds no folders, one a class"
        raise InputError(f"{folder}: {lacking} ({', '.join(SUFFIXES)}). Put the pictures of every class into a folder of it.")
    return read_pictures(pictures, Path(folder), size, channels, store)


def read_pictures(pictures: list[Picture], folder: Path, size: int | None, channels: int, store: str | Path | None) -> Records:
    """The pictures of a list, in its order."""
    if not pictures:
        raise InputError(f"{folder}: no pictures ({', '.join(SUFFIXES)}) where they should be. Get the data set again.")
    paths = [path for path, _ in pictures]
    shape = (channels, size, size) if size else _decoded(paths[0], None, channels).shape
    pixels = _decoded_all(paths, shape, size, channels) if store is None else _stored(paths, shape, size, channels, Path(store))
    return {"x": torch.from_numpy(pixels), "y": torch.tensor([label for _, label in pictures])}


def _decoded_all(
    paths: list[Path], shape: tuple[int, ...], size: int | None, channels: int, into: np.ndarray | None = None
) -> np.ndarray:
    pixels = np.empty((len(paths), *shape), np.uint8) if into is None else into

    def fill(row: int) -> None:
        picture = _decoded(paths[row], size, channels)
        if picture.shape != shape:
            raise InputError(
                f"{paths[row]}: has {picture.shape[2]} x {picture.shape[1]} pixels, expected {shape[2]} x {shape[1]}. "
                "Bring all pictures to one size, or name a size to which they are fitted."
            )
        pixels[row] = picture

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for _ in pool.map(fill, range(len(paths))):
            pass
    return pixels


def _decoded(path: Path, size: int | None, channels: int) -> np.ndarray:
    """One picture as uint8 ``[C, h, w]``."""
    if not path.is_file():  # opening a pipe would wait for ever
        raise InputError(f"{path}: {'is no file' if path.exists() else 'there is no such picture'}. Get the data set again.")
    try:
        with Image.open(path, formats=("PNG", "JPEG", "WEBP")) as picture:
            if math.prod(picture.size) > MOST_PIXELS:
                raise ValueError(f"it declares {picture.size[0]} x {picture.size[1]} pixels")
            plain = picture.convert("RGB" if channels == 3 else "L")
    except (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        struct.error,
        zlib.error,
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as error:
        raise InputError(f"{path}: cannot be read as a picture ({error}). Replace or remove it.") from error
    if size is not None and plain.size != (size, size):
        plain = ImageOps.fit(plain, (size, size), Image.Resampling.BICUBIC)
    pixels = np.asarray(plain)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)) if channels == 3 else pixels[None]


def _stored(paths: list[Path], shape: tuple[int, ...], size: int | None, channels: int, store: Path) -> np.ndarray:
    """The decoded pictures in a memory-mapped file whose name says what they were decoded from."""
    content = hashlib.blake2b(repr((shape, size)).encode(), digest_size=12)
    try:
        for path in paths:
            seen = path.stat()
            content.update(f"{path}/{seen.st_size}/{seen.st_mtime_ns}\n".encode())
        file = store / f"pixels-{content.hexdigest()}.npy"
        if not file.exists():
            store.mkdir(parents=True, exist_ok=True)
            part = store / f"{file.name}.{uuid.uuid4().hex}.part"
            try:
                into = np.lib.format.open_memmap(part, "w+", np.uint8, (len(paths), *shape))
                _decoded_all(paths, shape, size, channels, into)
                into.flush()
                part.replace(file)
            finally:
                part.unlink(missing_ok=True)
        pixels = np.load(file, mmap_mode="c", allow_pickle=False)  # copy on write: torch wants an array it could write to
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{store}: the decoded pixels cannot be kept there ({error}). Name a folder you may write to."
        ) from error
    if pixels.dtype != np.uint8 or pixels.shape != (len(paths), *shape):
        raise InputError(f"{file}: does not hold the {len(paths)} decoded pictures. Delete it.")
    return pixels
