"""ImageNet-style folders: train/<class>/*.jpg and val/<class>/*.jpg (or png), decoded with Pillow."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy
import torch
from torch import Tensor

from data.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Files", "centre_view", "image_folder", "prefetch", "random_view"]

ENDINGS = {".jpg", ".jpeg", ".png"}
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

Job = TypeVar("Job")
Result = TypeVar("Result")


class Files(NamedTuple):
    """Image files and the number of the class each belongs to."""

    paths: list[Path]
    labels: list[int]


def image_folder(folder: Path) -> tuple[Files, Files, list[str]]:
    """The training files, the validation files and the names of the classes, in the order of their names."""
    classes = _classes(folder / "train")
    unknown = sorted(set(_classes(folder / "val")) - set(classes))
    if unknown:
        raise DataError(folder / "val" / unknown[0], "a class without training images", "the classes of train/")
    return _files(folder / "train", classes), _files(folder / "val", classes), classes


def _classes(folder: Path) -> list[str]:
    expected = "a folder with one folder of .jpg, .jpeg or .png files for each class"
    if not folder.is_dir():
        raise DataError(folder, "no such folder", expected)
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if not classes:
        raise DataError(folder, "holds no folder", expected)
    return classes


def _files(folder: Path, classes: list[str]) -> Files:
    files = Files([], [])
    for label, name in enumerate(classes):
        found = sorted(path for path in (folder / name).glob("*") if path.suffix.lower() in ENDINGS)
        if not found:
            raise DataError(folder / name, "holds no image", "at least one .jpg, .jpeg or .png file")
        files.paths.extend(found)
        files.labels.extend([label] * len(found))
    return files


def random_view(path: Path, size: int, generator: torch.Generator) -> Tensor:
    """A random part of the image (8 to 100 % of its area), perhaps flipped, as ``(3, size, size)``."""
    image = _decode(path)
    area, ratio, x, y, flip = torch.rand(5, generator=generator).tolist()
    area = (0.08 + 0.92 * area) * image.width * image.height
    ratio = (3 / 4) ** (1 - 2 * ratio)  # width : height, 3:4 to 4:3
    width, height = min(image.width, (area * ratio) ** 0.5), min(image.height, (area / ratio) ** 0.5)
    left, top = x * (image.width - width), y * (image.height - height)
    pixels = _pixels(image, (left, top, left + width, top + height), size)
    return pixels.flip(2) if flip < 0.5 else pixels


def centre_view(path: Path, size: int) -> Tensor:
    """The middle square of the image, seven eighths of its shorter side, as ``(3, size, size)``."""
    image = _decode(path)
    side = 0.875 * min(image.width, image.height)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return _pixels(image, (left, top, left + side, top + side), size)


def _decode(path: Path) -> "Image":
    pillow = _pillow()
    try:
        with pillow.open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(path, f"cannot be read ({error})", "a complete JPEG or PNG image") from error


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("decoding images needs Pillow: pip install pillow") from error
    return Image


def _pixels(image: "Image", box: tuple[float, float, float, float], size: int) -> Tensor:
    resized = image.resize((size, size), resample=_pillow().Resampling.BILINEAR, box=box)
    pixels = torch.from_numpy(numpy.array(resized)).permute(2, 0, 1).float() / 255
    return (pixels - MEAN) / DEVIATION


def prefetch(load: Callable[[Job], Result], jobs: Iterable[Job], ahead: int = 4) -> Iterator[Result]:
    """``load(job)`` for each job, in order; the next ``ahead`` are loaded in threads while the caller works."""
    with ThreadPoolExecutor(max_workers=ahead) as pool:
        waiting: list[Future[Result]] = []
        for job in jobs:
            waiting.append(pool.submit(load, job))
            if len(waiting) > ahead:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()
