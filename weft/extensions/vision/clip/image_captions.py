"""The dataset of images with captions: an image, the tokens of its caption, and the number of the caption."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from weft.data.shard_patterns import first_missing
from weft.data.task_records import text_tokens
from weft.data.tokenizer import load_tokenizer
from weft.extensions.vision.clip.caption_files import CaptionFiles, open_captions
from weft.extensions.vision.image_dataset import ImageDataset
from weft.extensions.vision.image_operations import check_operations
from weft.job.data import ImageData
from weft.job.errors import JobError
from weft.job.schema import Job


def reads_captions(job: Job) -> bool:
    """Whether data.source holds images with captions: by data.format, or for a model that takes them."""
    return job.data.format == "captions" or (bool(job.model.towers) and first_missing(Path(job.data.source)) is None)


def open_image_captions(job: Job) -> ImageCaptions:
    """The images and captions of data.source."""
    data, options = job.data, job.data.images or ImageData()
    if not job.model.module:
        raise JobError(
            f"data.format=captions gives images and texts, and model.family={job.model.family} does not take both; "
            "model.family=clip or a module of your own would work"
        )
    if options.mixup or options.cutmix:
        raise JobError("data.images.mixup and cutmix mix classes, and images with captions have none; leave them out")
    check_operations(options)
    root = Path(data.source)
    if (missing := first_missing(root)) is not None:
        raise JobError(f"data.source {missing} does not exist; name a folder or file of images with captions")
    return ImageCaptions(job, options, open_captions(root, options.prompt))


class ImageCaptions:
    """Samples of `image` [colours, height, width] and `text` [data.seq_len], which ends with end tokens. The target is
    the number of the caption: images with the same caption have the same."""

    takes_epoch = True
    decodes = True

    def __init__(self, job: Job, options: ImageData, files: CaptionFiles) -> None:
        if options.size is None and job.model.towers:
            options = options.model_copy(update={"size": job.model.args["side"]})
        if options.channels is None and job.model.towers:
            options = options.model_copy(update={"channels": job.model.args["channels"]})
        plain = job.model.model_copy(update={"vocab": None, "args": {}})  # its classes are not words
        self._images = ImageDataset(job.model_copy(update={"model": plain}), options, files.train, files.val)
        self.train_len, self.val_len = self._images.train_len, self._images.val_len
        tokenizer, length = load_tokenizer(job.data.tokenizer), job.data.seq_len
        vocab = job.model.args.get("vocab")
        if isinstance(vocab, int) and vocab < tokenizer.vocab:
            raise JobError(f"model.vocab={vocab} is smaller than the {tokenizer.vocab} tokens of data.tokenizer="
                           f"{job.data.tokenizer}; write model.vocab={tokenizer.vocab}")  # fmt: skip
        self._texts = np.empty((len(files.captions), length), dtype=np.int32)
        for i, caption in enumerate(files.captions):
            tokens = text_tokens(tokenizer, caption, length, f"a caption of {job.data.source}")
            self._texts[i] = np.pad(tokens, (0, length - tokens.size), constant_values=int(tokens[-1]))
        self.fingerprint = f"{self._images.fingerprint}{zlib.crc32(self._texts.tobytes()):08x}"

    def train(self, index: int, epoch: int = 0) -> dict[str, np.ndarray]:
        """A training image, augmented as this epoch draws, with its caption."""
        return self._sample(self._images.train(index, epoch))

    def val(self, index: int) -> dict[str, np.ndarray]:
        """A held-out image with its caption."""
        return self._sample(self._images.val(index))

    def _sample(self, image: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        text = self._texts[int(image["targets"])].astype(np.int64)
        return {
            "inputs/image": image["inputs"], "inputs/text": text, "targets": image["targets"], "valid": image["valid"]
        }  # fmt: skip
