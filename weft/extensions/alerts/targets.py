"""Where alerts go: a command, a webhook or mail."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import smtplib
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import EmailMessage
from typing import Any
from urllib.parse import unquote, urlsplit

from weft.extensions.alerts.rules import Alert
from weft.job.import_by_name import find_object
from weft.job.watch import AlertTarget

TIMEOUT_S = 10.0
COMMAND_TIMEOUT_S = 30.0
PASSWORD_VARIABLE = "WEFT_SMTP_PASSWORD"


@dataclass(frozen=True)
class AlertMessage:
    """An alert of a run, ready to send."""

    run: str
    alert: Alert
    host: str
    time: str

    @classmethod
    def of(cls, run: str, alert: Alert) -> AlertMessage:
        """The message of an alert found now on this host."""
        return cls(run, alert, socket.gethostname(), datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def line(self) -> str:
        """The message in one line."""
        return f"[weft {self.alert.severity}] {self.run} on {self.host}: {self.alert.text}"

    def data(self) -> dict[str, Any]:
        """The message as JSON."""
        alert = self.alert
        return {
            "source": "weft", "run": self.run, "host": self.host, "time": self.time, "rule": alert.rule,
            "severity": alert.severity, "step": alert.step, "text": alert.text,
        }  # fmt: skip


SHAPES: dict[str, Callable[[AlertMessage], dict[str, Any]]] = {
    "json": AlertMessage.data,
    "slack": lambda m: {"text": m.line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")},
    "feishu": lambda m: {"msg_type": "text", "content": {"text": m.line}},
    "dingtalk": lambda m: {"msgtype": "text", "text": {"content": m.line}},
}


def send(target: AlertTarget, message: AlertMessage) -> None:
    """Send a message; raises OSError with the reason if that fails."""
    find_object(target.kind.send, "watch.alerts.to")(target, message)


def describe(target: AlertTarget) -> str:
    """A target without its secrets."""
    return target.kind.describe(target)


def expand(text: str) -> str:
    """Text with $NAME replaced by the environment variable; an OSError if it is not set."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise OSError(f"the environment variable {name} is not set")
        return os.environ[name]

    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text)


def run_command(target: AlertTarget, message: AlertMessage) -> None:
    """Start the target's program with the alert on its standard input and in its environment."""
    alert = message.alert
    environment = {
        **os.environ, "WEFT_ALERT_RULE": alert.rule, "WEFT_ALERT_TEXT": alert.text, "WEFT_ALERT_RUN": message.run,
        "WEFT_ALERT_SEVERITY": alert.severity, "WEFT_ALERT_STEP": "" if alert.step is None else str(alert.step),
    }  # fmt: skip
    try:
        done = subprocess.run(
            shlex.split(target.command), input=json.dumps(message.data()).encode(), env=environment,
            capture_output=True, timeout=COMMAND_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise OSError(f"the command did not end within {COMMAND_TIMEOUT_S:.0f} s") from None
    except ValueError as error:
        raise OSError(f"the command cannot be parsed: {error}") from None
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise OSError(f"the command ended with code {done.returncode}{': ' + last[0][:200] if last else ''}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would become a GET without the message, which any page answers."""

    def redirect_request(self, *args: Any) -> None:
        return None


def post(target: AlertTarget, message: AlertMessage) -> None:
    """POST the message as JSON to the target's webhook."""
    url, data = expand(target.webhook), SHAPES[target.shape](message)
    body = json.dumps(data, ensure_ascii=False).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json; charset=utf-8"}, method="POST")
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S) as answer:
            answer.read(1 << 16)
    except urllib.error.HTTPError as error:
        moved = "; write the address that it points to" if error.code in range(300, 400) else ""
        raise OSError(f"the webhook answered {error.code} {error.reason}{moved}") from None
    except http.client.HTTPException as error:
        raise OSError(f"the webhook did not answer in HTTP: {type(error).__name__} {error}") from None
    except (urllib.error.URLError, ValueError) as error:
        raise OSError(f"the webhook cannot be reached: {getattr(error, 'reason', error)}") from None


def send_mail(target: AlertTarget, message: AlertMessage) -> None:
    """Send the message by mail."""
    server = urlsplit(expand(target.smtp))
    mail = EmailMessage()
    mail["From"] = target.sender or f"weft@{message.host}"
    mail["To"] = expand(target.mail)
    mail["Subject"] = " ".join(f"[weft] {message.run}: {message.alert.rule}".split())
    known = {key: value for key, value in message.data().items() if value is not None and key not in ("source", "text")}
    facts = "\n".join(f"{key}: {value}" for key, value in known.items())
    mail.set_content(f"{message.alert.text}\n\n{facts}\n")
    host, context = server.hostname or "localhost", ssl.create_default_context()
    try:
        if server.scheme == "smtps":
            client: smtplib.SMTP = smtplib.SMTP_SSL(host, server.port or 465, timeout=TIMEOUT_S, context=context)
        else:
            client = smtplib.SMTP(host, server.port or 25, timeout=TIMEOUT_S)
        with client:
            if server.scheme == "smtp" and client.has_extn("starttls"):
                client.starttls(context=context)
            if server.username:
                client.login(unquote(server.username), os.environ.get(PASSWORD_VARIABLE, ""))
            client.send_message(mail)
    except smtplib.SMTPException as error:
        raise OSError(f"the mail server refused: {error}") from None
