"""Alerts about a run: rules that find them, and targets that receive them.

Registers the command `weft alerts test`, the sink that sends the alerts of a run, and the targets command, webhook and
mail.
"""

import shlex
from urllib.parse import urlsplit

from weft.cli.commands import COMMANDS, WATCH, Command
from weft.job.watch import ALERT_TARGETS, AlertTarget, AlertTargetKind
from weft.watch.sinks import SINKS, SinkKind

PACKAGE = __name__
SHELL_WORDS = {"|", "||", "&&", "&", ";", "<", ">", ">>", "2>", "2>&1"}
"""Words of a command that only a shell understands."""


def check_command(target: AlertTarget) -> str | None:
    try:
        words = shlex.split(target.command)
    except ValueError:
        return f"must have a command whose quotes are closed, not {target.command!r}"
    if set(words) & SHELL_WORDS:
        return f"must have a command without shell operators, or: command: sh -c {target.command!r}"
    return None


def check_webhook(target: AlertTarget) -> str | None:
    if target.webhook.startswith(("http://", "https://", "$")):
        return None
    return f"must have an http or https address or $NAME as webhook, not {target.webhook!r}"


def check_mail(target: AlertTarget) -> str | None:
    if not target.mail.startswith("$") and "@" not in target.mail:
        return f"must have an address such as me@example.org or $NAME as mail, not {target.mail!r}"
    if not target.smtp.startswith(("smtp://", "smtps://", "$")):
        return f"must have smtp://HOST:PORT or smtps://HOST:PORT as smtp, not {target.smtp!r}"
    return None


def describe_webhook(target: AlertTarget) -> str:
    return f"webhook {urlsplit(target.webhook).hostname or target.webhook} ({target.shape})"


COMMANDS.register(Command("alerts test", f"{PACKAGE}.command:alerts_test", WATCH, "Alerts about runs."))
SINKS.register(SinkKind("alerts", lambda job: bool(job.watch.alerts.to), f"{PACKAGE}.delivery:alert_sinks"))
for kind in (
    AlertTargetKind(
        "command", "a program and its arguments", f"{PACKAGE}.targets:run_command",
        lambda target: f"command {target.command.split()[0]}", check_command,
    ),
    AlertTargetKind("webhook", "an http or https address", f"{PACKAGE}.targets:post", describe_webhook, check_webhook),
    AlertTargetKind(
        "mail", "an e-mail address", f"{PACKAGE}.targets:send_mail", lambda target: f"mail {target.mail}", check_mail
    ),
):  # fmt: skip
    ALERT_TARGETS.register(kind)
