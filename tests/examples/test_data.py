"""The loaders of the examples, on small files written here: good, missing and damaged."""

from pathlib import Path

import numpy
import pytest
import torch
from data.cifar10 import RECORD, augment, cifar10, normalise
from data.digits import VALIDATION, digits
from data.errors import DataError
from data.image_folder import centre_view, image_folder, prefetch, random_view
from data.shards import Shards, even_share, generator
from data.source_text import SYMBOLS, corpus, windows
from PIL import Image

# -- shards


@pytest.mark.parametrize(("count", "size", "batch"), [(64, 2, 8), (67, 4, 5), (16, 1, 16)])
def test_shards_divide_an_epoch(count: int, size: int, batch: int) -> None:
    ranks = [Shards(count, batch, rank, size, seed=3) for rank in range(size)]
    steps = ranks[0].steps_per_epoch
    assert all(shards.steps_per_epoch == steps for shards in ranks)
    seen = torch.cat([shards[step] for shards in ranks for step in range(steps)])
    assert len(seen) == steps * size * batch == len(seen.unique())
    assert count - len(seen) < size * batch


def test_shards_depend_on_seed_and_epoch_only() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    shards = Shards(40, 4, rank=1, size=2, seed=7)
    first, next_epoch = shards[0], shards[5]
    assert not torch.equal(first, next_epoch)
    assert torch.equal(Shards(40, 4, rank=1, size=2, seed=7)[5], next_epoch), "any step can be the first one asked for"
    assert torch.equal(shards[0], first), "back in an earlier epoch"
    assert not torch.equal(Shards(40, 4, rank=1, size=2, seed=8)[0], first)
    assert torch.equal(torch.get_rng_state(), before), "the global generator is not touched"


def test_shards_need_a_batch_for_every_rank() -> None:
    with pytest.raises(ValueError, match="batch_size=8 on 4 ranks needs 32 examples, there are 31"):
        Shards(31, 8, rank=0, size=4, seed=0)


def test_even_share_covers_everything_once() -> None:
    shares = [range(10)[even_share(10, rank, 4)] for rank in range(4)]
    assert [index for share in shares for index in share] == list(range(10))


# -- digits


def test_digits_split_is_fixed() -> None:
    train, validation = digits()
    assert train.images.shape == (1797 - VALIDATION, 1, 8, 8)
    assert len(validation.labels) == VALIDATION
    assert sorted(set(validation.labels.tolist())) == list(range(10))
    again, _ = digits()
    assert torch.equal(train.images, again.images)


# -- source text


def write_sources(folder: Path, texts: dict[str, bytes]) -> Path:
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    return folder


def test_corpus_holds_whole_files_out(tmp_path: Path) -> None:
    folder = write_sources(tmp_path, {"b.py": b"x = 1\n", "a.py": b"held out", "c.txt": b"no", "c.py": b"\xff~"})
    text = corpus(folder)
    assert text.train.tolist() == [90, 2, 31, 2, 19, 1, 0, 96]
    assert "".join(chr(number + 30) for number in text.validation.tolist()) == "held out"


def test_corpus_is_bounded(tmp_path: Path) -> None:
    folder = write_sources(tmp_path, {f"{number:02}.py": b"a" * 100 for number in range(20)})
    text = corpus(folder, train_bytes=250, validation_bytes=60)
    assert len(text.train) == 250
    assert len(text.validation) == 60, "30 characters of each of the two files held out"


def test_corpus_of_the_standard_library() -> None:
    text = corpus()
    assert len(text.train) > 1_000_000
    assert int(text.train.max()) < SYMBOLS


def test_corpus_needs_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{tmp_path}: holds 0 files ending in .py; expected at least 2"):
        corpus(tmp_path)


def test_windows_overlap_by_one() -> None:
    rows = windows(torch.arange(11), length=4)
    assert rows.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]


# -- CIFAR-10


def write_cifar(folder: Path, records: int = 3) -> Path:
    for number, name in enumerate([*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]):
        content = numpy.full((records, RECORD), number, dtype=numpy.uint8)
        content[:, 0] = numpy.arange(records) % 10
        (folder / name).write_bytes(content.tobytes())
    return folder


def test_cifar10_reads_all_files(tmp_path: Path) -> None:
    train, test = cifar10(write_cifar(tmp_path))
    assert train.images.shape == (15, 3, 32, 32)
    assert train.images[:, 0, 0, 0].tolist() == [number for number in range(5) for _ in range(3)]
    assert train.labels.tolist() == [0, 1, 2] * 5
    assert test.images.shape == (3, 3, 32, 32)


def test_cifar10_missing_file(tmp_path: Path) -> None:
    (write_cifar(tmp_path) / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_3.bin: no such file; expected records of 3073 bytes"):
        cifar10(tmp_path)


@pytest.mark.parametrize("size", [0, RECORD - 1, 2 * RECORD + 1])
def test_cifar10_damaged_size(tmp_path: Path, size: int) -> None:
    (write_cifar(tmp_path) / "test_batch.bin").write_bytes(bytes(size))
    with pytest.raises(DataError, match=rf"test_batch.bin: {size} bytes, not a multiple of 3073"):
        cifar10(tmp_path)


def test_cifar10_wrong_label(tmp_path: Path) -> None:
    content = bytearray(3 * RECORD)
    content[2 * RECORD] = 10
    (write_cifar(tmp_path) / "data_batch_1.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_1.bin: record 2 has label 10; expected .* label 0 to 9"):
        cifar10(tmp_path)


def test_cifar10_augmentation_shifts_and_flips() -> None:
    images = torch.arange(1.0, 3 * 32 * 32 + 1).view(1, 3, 32, 32).repeat(64, 1, 1, 1)
    changed = augment(images, generator(1))
    assert changed.shape == images.shape
    assert torch.equal(changed, augment(images, generator(1)))
    rows = changed[:, 0, 16]
    flipped = (rows[:, 16] - rows[:, 15]) < 0
    assert 10 < int(flipped.sum()) < 54
    middle = images[0, :, 8:24, 8:24]
    for image in changed[~flipped][:5]:
        found = any(
            torch.equal(image[:, 8 + y : 24 + y, 8 + x : 24 + x], middle) for y in range(-4, 5) for x in range(-4, 5)
        )
        assert found


def test_cifar10_normalised() -> None:
    assert normalise(torch.full((1, 3, 2, 2), 125, dtype=torch.uint8)).abs().max() < 1


# -- image folders


def write_images(folder: Path) -> Path:
    for part in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            (folder / part / name).mkdir(parents=True)
            for number, ending in enumerate(("png", "JPEG")):
                image = Image.new("RGB", (40, 30), (100 * label, 50 * number, 200))
                image.save(folder / part / name / f"{number}.{ending}")
    return folder


def test_image_folder_lists_files(tmp_path: Path) -> None:
    train, held_out, classes = image_folder(write_images(tmp_path))
    assert classes == ["cat", "dog"]
    assert train.labels == held_out.labels == [0, 0, 1, 1]
    assert [path.name for path in train.paths] == ["0.png", "1.JPEG"] * 2


def test_views_have_the_size_asked_for(tmp_path: Path) -> None:
    train, _, _ = image_folder(write_images(tmp_path))
    for path in train.paths:
        assert centre_view(path, 16).shape == (3, 16, 16)
    views = [random_view(train.paths[2], 16, generator(seed)) for seed in range(20)]
    assert all(view.shape == (3, 16, 16) for view in views)
    pixels = views[0] * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1) + torch.tensor([0.485, 0.456, 0.406]).view(
        3, 1, 1
    )
    assert torch.allclose(pixels[:, 0, 0] * 255, torch.tensor([100.0, 0.0, 200.0]), atol=0.01)


def test_image_folder_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train: no such folder; expected a folder with one folder of"):
        image_folder(tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="train: holds no folder"):
        image_folder(tmp_path)


def test_image_folder_empty_class(tmp_path: Path) -> None:
    (write_images(tmp_path) / "train" / "ant").mkdir()
    with pytest.raises(DataError, match=r"ant: holds no image; expected at least one"):
        image_folder(tmp_path)


def test_image_folder_class_without_training_images(tmp_path: Path) -> None:
    (write_images(tmp_path) / "val" / "emu").mkdir()
    with pytest.raises(DataError, match=r"emu: a class without training images"):
        image_folder(tmp_path)


@pytest.mark.parametrize("keep", [0, 20, 500])
def test_unreadable_image(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "broken.jpg"
    noise = numpy.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=numpy.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"broken.jpg: cannot be read .*; expected a complete JPEG or PNG image"):
        centre_view(path, 16)


def test_prefetch_keeps_the_order_and_raises() -> None:
    assert list(prefetch(lambda job: job * 2, range(9), ahead=3)) == list(range(0, 18, 2))
    results = prefetch(lambda job: 1 // job, [1, 0])
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)
