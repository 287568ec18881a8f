"""Rules on the data: growing and streamed sources, tasks of a mixture, sizes of images."""

from __future__ import annotations

from weft.job.model_parts.loss_settings import NamedLoss
from weft.job.schema import Job
from weft.planner.plan import Plan

TASK_FIELDS = ("function", "output", "target")


def growing_rule(job: Job, plan: Plan) -> str | None:
    """A growing or streamed source has no known length, and its state is that of one stream of samples."""
    data = job.data
    if not (data.growing or data.streaming):
        return None
    field = "data.growing" if data.growing else "data.streaming"
    for wrong, what in (
        (data.growing and data.streaming, "data.streaming=true"),
        (data.streaming and data.format == "pairs", "data.format=pairs"),
        (data.streaming and data.format == "captions", "data.format=captions"),
        (data.streaming and data.workers not in (0, "auto"), f"data.workers={data.workers}"),
        (data.growing and bool(data.mixture), "data.mixture"),
        (data.temperature is not None, f"data.temperature={data.temperature or 0:g}"),
        (data.images is not None, "data.images"),
        (data.format == "labels", "data.format=labels"),
        (job.train.epochs is not None, f"train.epochs={job.train.epochs or 0:g}"),
        (data.drop_last, "data.drop_last=true"),
        (job.model.hides_tokens, f"model.family={job.model.family}"),
        (
            data.streaming and (job.model.has_source or job.model.takes_patches or job.model.takes_vectors),
            f"model.family={job.model.family}",
        ),
        (bool(job.model.module) and data.format is None and ":" in data.source, f"data.source={data.source}"),
        (job.train.sync.entry.starts_processes, f"train.sync={job.train.sync.mode}"),
    ):
        if wrong:
            return f"{field}=true does not support {what}; leave one of them out"
    return None


def images_rule(job: Job, plan: Plan) -> str | None:
    """The patches of a ViT cover an image, unless the model names its size and cuts off the rest."""
    side, patch = job.data.images.size if job.data.images is not None else None, job.model.patch or 4
    if not job.model.takes_patches or not side or job.model.image is not None or side % patch == 0:
        return None
    whole = max(patch, side // patch * patch)
    return f"data.images.size={side} is not a multiple of model.patch={patch}; size={whole} would work"


def tasks_rule(job: Job, plan: Plan) -> str | None:
    """Tasks have losses of your own module, or weights of the loss of a model of tokens."""
    data, model = job.data, job.model
    if not data.tasks:
        return None
    if isinstance(model.loss, dict) or model.loss == "contrastive":
        return (
            "data.mixture has tasks with a loss each, and model.loss is one of several outputs together; set the loss "
            "of each task in data.mixture, and leave model.loss out"
        )
    if model.module:
        return None
    if not (model.takes_tokens or model.has_source):
        return f"data.mixture has tasks, which model.family={model.family} does not support; leave their names out"
    for each in data.mixture:
        default = NamedLoss()
        if each.loss is not None and any(getattr(each.loss, k) != getattr(default, k) for k in TASK_FIELDS):
            return (
                f"data.mixture: task {each.name} sets a loss function, and model.family={model.family} has its own; "
                f"give its weight alone, such as loss: {{weight: {each.loss.weight:g}}}"
            )
    return None
