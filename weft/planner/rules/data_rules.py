"""Rules on the data: tasks of a mixture."""

from __future__ import annotations

from weft.job.model_parts.named_loss import NamedLoss
from weft.job.schema import Job
from weft.planner.plan import Plan

TASK_FIELDS = ("function", "output", "target")


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
    if not (model.takes_tokens or model.is_encoder_decoder):
        return f"data.mixture has tasks, which model.family={model.family} does not support; leave their names out"
    for each in data.mixture:
        default = NamedLoss()
        if each.loss is not None and any(getattr(each.loss, k) != getattr(default, k) for k in TASK_FIELDS):
            return (
                f"data.mixture: task {each.name} sets a loss function, and model.family={model.family} has its own; "
                f"give its weight alone, such as loss: {{weight: {each.loss.weight:g}}}"
            )
    return None
