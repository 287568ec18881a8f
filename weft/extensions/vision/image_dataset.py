"""The dataset of image files: decoded, augmented, mixed and normalised samples by number."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.data.patches import image_patches
from weft.data.shard_patterns import first_missing
from weft.data.synthetic import SYNTHETIC_SIDE, SyntheticPictures
from weft.extensions.vision.augment import augmented, erased, mixed, plain, random_of
from weft.extensions.vision.decoded_images import ImageFiles
from weft.extensions.vision.hub_images import is_hub_dataset, open_hub_images
from weft.extensions.vision.idx_files import URLS, find_idx, named_idx
from weft.extensions.vision.image_files import detect, open_files, open_idx
from weft.extensions.vision.image_operations import check_operations
from weft.job.data import ImageData
from weft.job.errors import JobError
from weft.job.schema import Job, Model

IMAGE_SOURCES = tuple(URLS)


def reads_images(job: Job) -> bool:
    """Whether data.source is one of images: by name, by its section, for a model of images any path, or by files of
    MNIST's format."""
    data, model = job.data, job.model
    if data.source == "synthetic":  # noise is augmented as images of files are, where the job says so
        images = model.takes_patches or (model.module and not model.tables and not model.towers)
        return data.images is not None and data.images.augments and bool(images)
    if data.format is not None:
        return False
    if data.source in IMAGE_SOURCES or data.images is not None:
        return True
    path = Path(data.source)
    if model.takes_patches or (model.module and model.family and not model.tables):
        return first_missing(path) is None or is_hub_dataset(data.source)
    return path.is_dir() and find_idx(path) is not None


def open_images(job: Job) -> ImageDataset:
    """The images of data.source."""
    data, options = job.data, job.data.images or ImageData()
    if not (job.model.module or job.model.takes_patches):
        raise JobError(
            f"data.source {data.source} gives images, and model.family {job.model.family} does not take them; "
            "model.family=vit, resnet or a module of your own would work"
        )
    check_operations(options)
    image = job.model.image
    if options.size is None and image is not None and image[0] == image[1]:
        options = options.model_copy(update={"size": image[0]})
    if data.source in IMAGE_SOURCES:
        train, val = open_idx(named_idx(data.source))
        return ImageDataset(job, options, train, val)
    if data.source == "synthetic":
        return ImageDataset(job, options, *_synthetic_files(job, options))
    if is_hub_dataset(data.source):
        return ImageDataset(job, options, *open_hub_images(data.source))
    root = Path(data.source)
    if (missing := first_missing(root)) is not None:
        raise JobError(f"data.source {missing} does not exist; it may be {', '.join(IMAGE_SOURCES)} or a path")
    files, held_out = open_files(root, detect(root) if options.format == "auto" else options.format)
    return ImageDataset(job, options, files, held_out)


def _synthetic_files(job: Job, options: ImageData) -> tuple[ImageFiles, ImageFiles]:
    """Synthetic images as bytes, as files would hold them: for training and held out."""
    model, side = job.model, options.size or SYNTHETIC_SIDE
    if options.size is None and model.takes_patches:
        side = (model.patch or 4) * math.isqrt(job.data.seq_len - bool(model.class_token))
    classes = model.vocab or model.args.get("classes")
    if not isinstance(classes, int):
        raise JobError("data.source synthetic needs model.vocab, such as model.vocab=10")
    made = SyntheticPictures(job.train.seed, (options.channels or _channels_of(model) or 3, side, side), classes)

    def files(sample_of: Callable[[int], dict[str, np.ndarray]], count: int) -> ImageFiles:
        def read(index: int) -> tuple[NDArray[np.uint8], int]:
            sample = sample_of(index)
            pixels = np.clip(128 + 32 * sample["inputs"], 0, 255).astype(np.uint8)
            return pixels.transpose(1, 2, 0), int(sample["targets"])

        return ImageFiles(count, read, classes)

    return files(made.train, made.train_len), files(made.val, made.val_len)


SAMPLED_IMAGES = 16
"""Of a module of your own, the images that decide whether all are grey."""


def _channels(job: Job, images: ImageFiles) -> int | None:
    """Colours of the images: those of the model, or else three unless the first ones are all grey. Files of both kinds
    are common, as in ImageNet."""
    found = _channels_of(job.model)
    if found is None:
        found = max(images.read(i)[0].shape[-1] for i in range(min(SAMPLED_IMAGES, images.count)))
    return found if found in (1, 3) else None


def _channels_of(model: Model) -> int | None:
    """Colours that the model takes, where the job says it."""
    found: int | None = model.channels or model.args.get("channels") or (3 if model.takes_patches else None)
    return found


class ImageDataset:
    """Samples of images: inputs [colours, height, width], or patches for a ViT, and a class. A mixed image has the
    probabilities of all classes as its target."""

    takes_epoch = True
    decodes = True

    def __init__(self, job: Job, options: ImageData, train: ImageFiles, val: ImageFiles | None) -> None:
        options = options.model_copy(update={"channels": options.channels or _channels(job, train)})
        self._options, self._seed = options, job.train.seed
        self._train, self._val = train, val or train
        self._order = np.arange(train.count)
        held_out = 0
        if val is None:  # the files may be sorted by class
            held_out = min(train.count - 1, round(train.count * job.data.val_fraction))
            self._order = random_of(0, 0, 0).permutation(train.count)
        self.train_len, self.val_len = train.count - held_out, val.count if val is not None else held_out
        self._shared = val is None
        self.classes = max(train.classes, self._val.classes)
        model = job.model
        wanted = model.vocab or model.args.get("classes")
        if isinstance(wanted, int) and wanted < self.classes:
            raise JobError(f"data.source {job.data.source} has {self.classes} classes, and the model {wanted}; write "
                           f"model.vocab={self.classes}")  # fmt: skip
        self.classes = wanted if isinstance(wanted, int) else self.classes
        self._mixes = bool(options.mixup or options.cutmix)
        self._model = model if model.takes_patches else None
        self._mean, self._std = (np.asarray(v, dtype=np.float32) for v in (options.mean, options.std))
        if not self._std.all():
            raise JobError(f"data.images.std={options.std} divides by 0")
        for name, values in (("mean", options.mean), ("std", options.std)):
            if options.channels is not None and len(values) not in (1, options.channels):
                raise JobError(f"data.images.{name}={list(values)} has {len(values)} values, and images have "
                               f"{options.channels} colours; write one value, or one for each colour")  # fmt: skip
        first = self.train(0)
        self.fingerprint = f"{zlib.crc32(repr((train.count, self.val_len, first['inputs'].shape)).encode()):08x}"
        if self._model is not None and (count := len(first["inputs"])) != job.data.seq_len:
            token = "the class token and " if model.class_token else ""
            raise JobError(f"an image of data.source {job.data.source} has {token}{count - bool(token)} patches of "
                           f"model.patch={model.patch or 4}; write data.seq_len={count}")  # fmt: skip

    def train(self, index: int, epoch: int = 0) -> dict[str, np.ndarray]:
        """A training image, augmented as this epoch draws."""
        random, options = random_of(self._seed, index, epoch), self._options
        image, label = self._augmented(index, random)
        target = np.asarray(label, dtype=np.int64)
        if self._mixes:
            other, other_label = self._augmented(int(random.integers(self.train_len)), random)
            image, share = mixed(image, other, options, random)
            target = np.zeros(self.classes, dtype=np.float32)
            target[label] += share
            target[other_label] += 1 - share
        image = self._normalised(image)
        if options.erase and random.random() < options.erase:
            image = erased(image, random)
        return self._sample(image, target)

    def val(self, index: int) -> dict[str, np.ndarray]:
        """A held-out image."""
        number = int(self._order[self.train_len + index]) if self._shared else index
        pixels, label = self._val.read(number)
        image = self._normalised(plain(self._coloured(pixels), self._options))
        return self._sample(image, np.asarray(label, dtype=np.int64))

    def _augmented(self, index: int, random: np.random.Generator) -> tuple[NDArray[np.float32], int]:
        pixels, label = self._train.read(int(self._order[index]))
        return augmented(self._coloured(pixels), self._options, random), label

    def _coloured(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        wanted = self._options.channels
        if wanted is None or pixels.shape[-1] == wanted:
            return pixels
        if wanted == 3:
            return np.repeat(pixels, 3, axis=-1)
        weights = np.array([299, 587, 114], dtype=np.int64)  # as Pillow makes an image grey
        return ((pixels.astype(np.int64) @ weights + 500) // 1000).astype(np.uint8)[..., None]

    def _normalised(self, image: NDArray[np.float32]) -> NDArray[np.float32]:
        return (image - self._mean) / self._std

    def _sample(self, image: NDArray[np.float32], target: np.ndarray) -> dict[str, np.ndarray]:
        inputs = np.ascontiguousarray(image.transpose(2, 0, 1))
        if self._model is not None:
            try:
                inputs = image_patches(inputs, self._model)
            except ValueError as error:
                raise JobError(f"an image {error}") from None
        return {"inputs": inputs, "targets": target, "valid": np.ones((), dtype=np.bool_)}
