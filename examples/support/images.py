"""ImageNet's two layouts, folders of JPEG files and TFRecord files, as one thing: encoded images by number."""

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image, UnidentifiedImageError

from . import tfrecord
from .datafiles import DamagedDataError, MissingDataError

SUFFIXES = (".jpeg", ".jpg", ".png")
PARTS = {"train": "train", "val": "validation"}
"""How the parts are called as folders, and as TFRecord files."""


class Images(Protocol):
    """A dataset of encoded images.

    Attributes:
        classes: the names of the classes, in the order of their labels.
    """

    classes: Sequence[str]

    def __len__(self) -> int:
        """Return the number of images."""

    def name(self, index: int) -> str:
        """Say where an image is, for messages."""

    def read(self, index: int) -> tuple[bytes, int]:
        """Return an image as it is stored, and its label from 0. Any thread or process may call this."""


class FolderImages:
    """Images in FOLDER/CLASS/*: the labels are the places of the classes in alphabetical order.

    Raises:
        MissingDataError: the folder, its classes or the images of a class are not there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.classes: Sequence[str] = class_folders(folder)
        self._names: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(self.classes):
            files = sorted(file for file in os.listdir(folder / name) if file.lower().endswith(SUFFIXES))
            if not files:
                raise MissingDataError(f"{folder / name} holds no image ({', '.join(SUFFIXES)}, in either case)")
            self._names += files
            labels += [label] * len(files)
        self._labels = np.array(labels, np.int32)

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        return str(self._folder / self.classes[self._labels[index]] / self._names[index])

    def read(self, index: int) -> tuple[bytes, int]:
        """Return an image as it is stored, and its label."""
        with open(self.name(index), "rb") as stream:
            return stream.read(), int(self._labels[index])


class RecordImages:
    """Images in DATA/PART-*-of-*, read at the offsets of their records.

    Args:
        data: the folder.
        part: ``train`` or ``validation``.
        classes: how many there are; the labels in the files are 1 to this number.

    Raises:
        MissingDataError: not all the files are there.
        RecordError: a file is damaged.
    """

    def __init__(self, data: Path, part: str, classes: int) -> None:
        """Read the indices, or make them."""
        self.classes: Sequence[str] = [str(label) for label in range(1, classes + 1)]
        self._files = record_files(data, part)
        self._records = [tfrecord.read_index(path) for path in self._files]
        self._ends = np.cumsum([len(records) for records in self._records])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def name(self, index: int) -> str:
        path, offset, _ = self._find(index)
        return f"{path}, the record at byte {offset}"

    def read(self, index: int) -> tuple[bytes, int]:
        """Return an image as it is stored, and its label from 0."""
        try:
            image, label = tfrecord.read_record(*self._find(index))
        except tfrecord.RecordError as error:
            raise DamagedDataError(str(error)) from error
        if not 1 <= label <= len(self.classes):
            raise DamagedDataError(
                f"{self.name(index)}: its label is {label}, and there are {len(self.classes)} classes, from 1; "
                "say how many with --classes"
            )
        return image, label - 1

    def _find(self, index: int) -> tuple[Path, int, int]:
        file = int(np.searchsorted(self._ends, index, side="right"))
        offset, size = self._records[file][index - self._ends[file]]  # counted from the end of the file's records
        return self._files[file], int(offset), int(size)


def open_images(data: Path, part: str, classes: int) -> FolderImages | RecordImages:
    """Open a part of the data, ``train`` or ``val``, in whichever layout it is; ``classes`` is for TFRecord files."""
    if is_records(data):
        return RecordImages(data, PARTS[part], classes)
    return FolderImages(data / part)


def check_layout(data: Path, parts: Sequence[str] = tuple(PARTS)) -> None:
    """Look at the outside of the data, quickly: what is missing, or does not fit, is told before anything starts.

    Raises:
        MissingDataError: there are no data, or not all of them.
        ValueError: training and validation have different classes.
    """
    if is_records(data):
        for part in parts:
            record_files(data, PARTS[part])
        return
    if not any((data / part).is_dir() for part in PARTS):
        raise MissingDataError(
            f"no ImageNet in {data}: it should hold folders, {data / 'train'}/CLASS/*.JPEG and "
            f"{data / 'val'}/CLASS/*.JPEG, or TFRecord files, {data / 'train-00000-of-01024'} and "
            f"{data / 'validation-00000-of-00128'} and so on. The images are on https://image-net.org after a login"
        )
    found = {part: set(class_folders(data / part)) for part in parts}
    for one, other in (("train", "val"), ("val", "train")):
        alone = sorted(found.get(one, set()) - found.get(other, set())) if len(found) > 1 else []
        if alone:
            shown = ", ".join(alone[:5]) + (f" and {len(alone) - 5} more" if len(alone) > 5 else "")
            raise ValueError(f"{data / other} lacks classes that {data / one} has: {shown}")


def class_folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted.

    Raises:
        MissingDataError: there are none.
    """
    if not folder.is_dir():
        raise MissingDataError(f"{folder} is missing: it should hold a folder of JPEG files for each class")
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise MissingDataError(
            f"{folder} holds no folder, and there should be one for each class, with its images. (ImageNet's "
            f"validation images come in one folder: sort them into {folder}/CLASS/ by their labels first)"
        )
    return names


def is_records(data: Path) -> bool:
    """Tell whether a folder has TFRecord files, and no folders of images."""
    return not (data / "train").is_dir() and any(_shards(data, part) for part in PARTS.values())


def record_files(data: Path, part: str) -> list[Path]:
    """Return the TFRecord files of a part in order.

    Raises:
        MissingDataError: files are missing.
    """
    found = _shards(data, part)
    if not found:
        raise MissingDataError(f"no file of {data / part}-*-of-* is there, as {data / part}-00000-of-00128")
    last = found[max(found)].name.rpartition("-")[2]
    missing = [f"{part}-{number:05d}-of-{last}" for number in range(int(last)) if number not in found]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise MissingDataError(f"files are missing in {data}: {shown}")
    return [found[number] for number in sorted(found)]


def decode(data: bytes, name: str) -> Image.Image:
    """Decode an image with Pillow; raises ``DamagedDataError`` with its name."""
    try:
        return Image.open(io.BytesIO(data)).convert("RGB")
    except UnidentifiedImageError:
        raise DamagedDataError(f"{name} is no image that can be decoded: fetch it again, or remove it") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # what Pillow's formats raise
        raise DamagedDataError(f"{name} cannot be decoded: {error}. Fetch it again, or remove it") from error


def _shards(data: Path, part: str) -> dict[int, Path]:
    shape = re.compile(rf"{part}-(\d+)-of-\d+")
    names = os.listdir(data) if data.is_dir() else []
    return {int(match[1]): data / name for name in names if (match := shape.fullmatch(name))}
