"""`watch.alerts`: what is reported about a run, and where to."""

from __future__ import annotations

from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from weft.job.section import Section

AlertRuleName = Literal["non_finite", "spike", "stalled", "slow", "goodput", "disk", "gpu_errors", "finished"]


class AlertTarget(Section):
    """Where alerts go: one of command, webhook and mail. $NAME in a value is replaced by the environment variable, so
    that secrets need not be in the job."""

    command: str = ""
    """A program and its arguments. It is started for every alert with the alert as JSON on stdin and in the variables
    WEFT_ALERT_RULE, WEFT_ALERT_TEXT, WEFT_ALERT_RUN and WEFT_ALERT_STEP. No shell is used."""
    webhook: str = ""
    """An http or https address that takes a POST with JSON."""
    shape: Literal["json", "slack", "feishu", "dingtalk"] = "json"
    """Form of the webhook's JSON: Weft's own, or that of a chat."""
    mail: str = ""
    """An e-mail address."""
    smtp: str = "smtp://localhost:25"
    """Mail server: smtp://HOST:PORT (STARTTLS if it is offered) or smtps://HOST:PORT, with USER@ before HOST to log in
    with the password of WEFT_SMTP_PASSWORD."""
    sender: str = ""
    """Address of the sender; weft@ this host if empty."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [name for name in ("command", "webhook", "mail") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError("must have exactly one of command, webhook and mail")
        if self.webhook and not self.webhook.startswith(("http://", "https://", "$")):
            raise ValueError(f"must have an http or https address or $NAME as webhook, not {self.webhook!r}")
        if not self.smtp.startswith(("smtp://", "smtps://", "$")):
            raise ValueError(f"must have smtp://HOST:PORT or smtps://HOST:PORT as smtp, not {self.smtp!r}")
        return self


class Alerts(Section):
    """Messages about a run, sent by a process of their own. None is sent unless `to` is given."""

    to: list[AlertTarget] = Field(default_factory=list)
    """Where to, such as [{webhook: "https://…", shape: slack}, {mail: me@example.org}]."""
    rules: list[AlertRuleName] = Field(default_factory=lambda: list(get_args(AlertRuleName)))
    """What is reported: non-finite loss or gradient, a loss spike, no step for a long time, steps slower than before,
    a low share of time in steps, a disk that is nearly full, errors of a GPU, and the end of the run."""
    stalled_s: float = Field(300.0, gt=0)
    """stalled: seconds without a step; at least 20 times the usual step time."""
    slow_percent: float = Field(30.0, gt=0)
    """slow: how much longer recent steps take than the run's usual ones, in percent."""
    goodput_below: float = Field(0.5, gt=0, lt=1)
    """goodput: least share of the time since the start that new steps took; judged after ten minutes."""
    disk_percent: float = Field(95.0, gt=0, lt=100)
    """disk: used share of the disk of the run folder, in percent."""
    repeat_s: float = Field(3600.0, ge=0)
    """Seconds before the same alert is sent again."""
    per_hour: int = Field(30, ge=1, le=10_000)
    """Most messages in an hour; the number of those held back is in the next one."""
