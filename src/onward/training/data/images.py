"""Files of images, with the column `image`; in folders with a subfolder per class, also `label`."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onward.errors import DataError, first_line
from onward.recipe.preprocessing.pipeline import Pipeline, Single, form_of
from onward.training.data.dataset import Batch, Column, Dataset, check_not_empty, optional_package
from onward.training.data.files import check_file, files_in

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_HINTS = {
    "size": "begin preprocessing with `resize` or `center_crop`: `--preprocess 'resize:size=32 ...'`",
    "mode": "convert all images to the same mode, or give the model a fixed number of channels",
}
_ORIENTATION = 0x0112  # EXIF tag
_CHANNELS = {mode: channels for channels, mode in _MODES.items()}


@dataclass(frozen=True)
class ImageFormat:
    """Format of decoded images, uint8. None means the format of the first image, which all must have."""

    size: tuple[int, int] | None = None  # height, width; images are resized to it
    mode: str | None = None  # L (grayscale), RGB or RGBA; images are converted to it
    channels_last: bool = False  # height, width, channels; else channels, height, width
    single: Single | None = None  # operations for each image, to one size; then float32 from 0 to 255


def format_for(inputs: Mapping[str, Any], first: Mapping[str, Pipeline] | None = None) -> ImageFormat:
    """Return the image format of a model: that of its only image-like input of rank 4.

    Operations of `first` that bring images to one size are applied to each image alone.
    """
    formats = {name: form for name, value in inputs.items() if (form := _format_of(value)) is not None}
    if len(formats) != 1:
        return ImageFormat()
    [(name, image_format)] = formats.items()
    pipeline = (first or {}).get(name)
    if pipeline is None or image_format.size is not None:
        return image_format
    return dataclasses.replace(image_format, single=Single.of(pipeline, form_of(inputs[name])))


def _format_of(value: Any) -> ImageFormat | None:
    dims = [dim if isinstance(dim, int) else None for dim in value.shape or ()]
    if len(dims) != 4:
        return None
    _, first, middle, last = dims
    if first in _MODES or last not in _MODES:
        size = (middle, last) if middle and last else None
        return ImageFormat(size, _MODES.get(first or 0))
    return ImageFormat((first, middle) if first and middle else None, _MODES[last or 0], channels_last=True)


class ImageFiles(Dataset):
    """Images, decoded when they are taken, with labels if there are classes."""

    def __init__(
        self,
        files: list[str],  # there may be millions
        image_format: ImageFormat,
        origin: str,
        labels: Sequence[int] = (),
        classes: Sequence[str] = (),
    ):
        check_not_empty(len(files), origin)
        super().__init__({}, len(files), origin)
        self.files: list[str] = files
        self._labels = np.array(labels, np.int64)
        self._decode = Decoder(image_format, _bytes(files[0]), files[0])
        self.columns = {"image": self._decode.column}
        if classes:
            self.columns["label"] = Column(np.dtype(np.int64), classes=tuple(classes))

    def _take(self, indices: np.ndarray, names: Sequence[str]) -> Batch:
        return {name: self._labels[indices] if name == "label" else self._images(indices) for name in names}

    def row(self, index: int) -> str:
        return self.files[index]

    def _images(self, indices: np.ndarray) -> np.ndarray:
        files = [self.files[index] for index in indices]
        return np.stack([self._decode(_bytes(path), path) for path in files])


def images_by_class(folder: Path, image_format: ImageFormat) -> ImageFiles:
    """Open a folder with a subfolder of images per class."""
    classes = [path.name for path in files_in(folder) if path.is_dir()]
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        of_class = _images_in(folder / name)
        if not of_class:
            raise DataError(f"there are no images in {folder / name}", hint="each subfolder is a class")
        files += of_class
        labels += [label] * len(of_class)
    return ImageFiles(files, image_format, folder.name, labels, classes)


def images_below(paths: Sequence[Path], image_format: ImageFormat) -> ImageFiles:
    """Open images without labels: files, and all images in folders and their subfolders."""
    files = [file for path in paths for file in (_images_in(path) if path.is_dir() else [str(path)])]
    if not files:
        raise DataError(f"there are no images in {paths[0]}", hint=f"images end in {', '.join(sorted(SUFFIXES))}")
    return ImageFiles(files, image_format, str(paths[0]) if len(paths) == 1 else "the images")


def _images_in(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


def _bytes(path: str) -> bytes:
    check_file(path)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


# ---- decoding --------------------------------------------------------------------------------------------------------


class Decoder:
    """Decoder of images to arrays. A first image determines what the format leaves open."""

    def __init__(self, image_format: ImageFormat, first: bytes, origin: str):
        image = _open(first, origin)
        self._format = image_format
        self._size = image_format.size or (image.height, image.width)
        self._mode = image_format.mode or _natural_mode(image, origin)
        channels = _CHANNELS[self._mode]
        shape = (*self._size, channels) if image_format.channels_last else (channels, *self._size)
        self.column = Column(np.dtype(np.uint8), shape, is_costly=True)
        if image_format.single is not None:
            array = self(first, origin)
            self.column = Column(array.dtype, array.shape, limit=255.0, is_costly=True)

    def __call__(self, encoded: bytes, origin: str) -> np.ndarray:
        image = _open(encoded, origin)
        mode, size = _natural_mode(image, origin), (image.height, image.width)
        if self._format.mode is None and _CHANNELS[mode] > _CHANNELS[self._mode]:
            raise DataError(f"{origin} is {mode}, but the first image is {self._mode}", hint=_HINTS["mode"])
        image = image.convert(self._mode)
        if self._format.single is not None:
            if any(length < least for length, least in zip(size, self._format.single.least, strict=True)):
                message = f"{origin} is {_pixels(size)} pixels, too small for `{self._format.single}`"
                raise DataError(message, hint="put a `resize` before it, or remove that image")
            return self._format.single(self._values(image))
        if self._format.size is None and size != self._size:
            pixels, first = map(_pixels, (size, self._size))
            raise DataError(f"{origin} is {pixels} pixels, but the first image is {first}", hint=_HINTS["size"])
        if size != self._size:
            image = image.resize(self._size[::-1], _pillow().Resampling.BILINEAR)
        return self._values(image)

    def _values(self, image: Any) -> np.ndarray:
        values = np.asarray(image).reshape(image.height, image.width, -1)
        return values if self._format.channels_last else np.ascontiguousarray(values.transpose(2, 0, 1))


def _pixels(size: tuple[int, int]) -> str:
    return f"{size[1]} x {size[0]}"


def _natural_mode(image: Any, origin: str) -> str:
    """Return the mode that keeps the content of an image."""
    if image.mode[0] in "IF":  # Pillow would clip the values
        raise DataError(f"{origin} has more than 8 bits per channel", hint="convert it, or train on arrays (.npy)")
    transparent = "A" in image.mode or "transparency" in image.info
    return "RGBA" if transparent else "L" if image.mode in ("1", "L") else "RGB"


def _open(encoded: bytes, origin: str) -> Any:
    pillow = _pillow()
    try:
        image = pillow.open(io.BytesIO(encoded))
        image.load()
        if image.getexif().get(_ORIENTATION, 1) != 1:  # rotated by a camera
            return optional_package("PIL.ImageOps", "reading images").exif_transpose(image)
        return image
    except Exception as error:  # Pillow raises many types for bad files
        text = f"{origin} is not a complete image: {first_line(error)}"
        raise DataError(text, hint="replace or remove it") from None


def _pillow() -> Any:
    return optional_package("PIL.Image", "reading images")
