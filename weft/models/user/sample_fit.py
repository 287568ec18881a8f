"""Which samples of a user's dataset the models of Weft's own have positions, colours or a width for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from weft.job.schema import Model

Sample = Mapping[str, np.ndarray]


def misfit(model: Model, sample: Sample) -> str | None:
    """What of a sample the model cannot take, and what would work; None if it fits."""
    check = CHECKS.get(model.family or "")
    return None if check is None else check(model, sample)


def _too_long(model: Model, sample: Sample) -> str | None:
    """Tokens, or patches of an image, beyond the learned positions."""
    count = len(sample["inputs"]) if sample["inputs"].ndim else 0
    if model.positions != "learned" or model.max_len is None or count <= model.max_len:
        return None
    what, shorter = ("patches", "give smaller images") if model.takes_patches else ("tokens", "cut the samples")
    longer = "" if model.pretrained else f", or write data.seq_len={count} and model.max_len={count}"
    return f"{count} {what}, and the model has positions for {model.max_len} (model.max_len); {shorter}{longer}"


def _other_colours(model: Model, sample: Sample) -> str | None:
    image, channels = sample.get("inputs", sample.get("inputs/images")), model.args.get("channels", 3)
    return None if image is None else _image_problem(image, channels, "model.channels")


def _image_problem(image: np.ndarray, channels: int, field: str) -> str | None:
    if image.ndim == 3 and image.shape[0] == channels:
        return None
    hint = "give [channels, height, width]"
    if image.ndim == 3:
        hint = f"write {field}={len(image)}" if len(image) < min(image.shape[1:]) else "put the colours first"
    return f"an image of shape {list(image.shape)}, and the model takes [{channels}, height, width]; {hint}"


def _other_pair(model: Model, sample: Sample) -> str | None:
    image, text = sample.get("inputs/image"), sample.get("inputs/text")
    side, patch, longest = (model.args.get(name) for name in ("side", "patch", "context"))
    if image is not None:
        if problem := _image_problem(image, model.args.get("channels", 3), "model.channels"):
            return problem
        if side and patch and [n // patch for n in image.shape[1:]] != [side // patch] * 2:
            height, width = image.shape[1:]
            hint = f", or write model.image=[{height},{width}]" if height == width else ""
            return f"an image of {height} × {width} pixels, and the model takes {side} × {side}; resize it{hint}"
    if text is not None and longest and (text.ndim != 1 or len(text) > longest):
        return f"a text of shape {list(text.shape)}, and the model takes up to {longest} tokens; cut it"
    return None


def _other_width(model: Model, sample: Sample) -> str | None:
    for key in ("inputs", "targets"):
        if (shape := sample[key].shape) != (model.dim,):
            hint = f"write model.dim={shape[0]}" if key == "inputs" and len(shape) == 1 else f"give [{model.dim}]"
            return (
                f"{key} of shape {list(shape)}, and the model takes and returns {model.dim} values (model.dim); {hint}"
            )
    return None


CHECKS: dict[str, Callable[[Model, Sample], str | None]] = {
    "llama": _too_long,
    "gpt2": _too_long,
    "bert": _too_long,
    "vit": _too_long,
    "resnet": _other_colours,
    "clip": _other_pair,
    "mlp": _other_width,
}
"""By model.family; the others take samples of any size, or check them themselves."""
