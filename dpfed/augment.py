"""Augmentations: pure functions of a record and its key, for `FlatModel(augment=...)` and `Task(augment=...)`.

They cost no privacy: a variant of a record is a function of that record alone. Evaluation never augments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpfed.errors import InputError
from dpfed.flat import Augment, Records
from dpfed.keyed import uniform


def pad_crop_flip(pad: int, *, shape: tuple[int, int, int] | None = None) -> Augment:
    """Images ``x`` of ``[C, H, W]``, moved by up to ``pad`` pixels each way, and every second one mirrored left to right.

    What comes in over the edge is the image reflected at it. ``shape``: that of the images, where the records are flat.

    >>> image = {"x": torch.arange(4).expand(1, 4, 4)}
    >>> [pad_crop_flip(1)(image, torch.tensor(key))["x"][0, 0].tolist() for key in range(3)]
    [[3, 2, 1, 0], [2, 1, 0, 1], [2, 1, 0, 1]]
    """

    def moved(size: int, draw: Tensor) -> Tensor:
        """Which rows (or columns) of the image stand in the new one."""
        places = torch.arange(size, device=draw.device) + (draw * (2 * pad + 1)).long() - pad
        return (size - 1) - ((size - 1) - places.abs()).abs()

    def augment(example: Records, key: Tensor) -> Records:
        x = example["x"]
        image = x if shape is None else x.reshape(shape)
        if not 0 <= pad < min(image.shape[-2:]):
            raise InputError(f"pad: must be at least 0 and below the height and width {tuple(image.shape[-2:])}, got {pad}.")
        down, right, mirror = uniform(key, 3).unbind(-1)
        rows, columns = moved(image.shape[-2], down), moved(image.shape[-1], right)
        columns = torch.where(mirror < 0.5, columns.flip(-1), columns)
        return example | {"x": image[..., rows, :][..., columns].reshape(x.shape)}

    return augment
