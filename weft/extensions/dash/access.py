"""Who may use the dashboard: this machine, or anybody with the token."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "weft_dash"
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class AccessControl:
    """Allows GET and HEAD with the token. Without a token, only requests whose Host is this machine, so that a web page
    whose name was pointed at 127.0.0.1 reads nothing."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        answer = self._refuse(scope)
        await (answer or self.app)(scope, receive, send_with_headers)

    def _refuse(self, scope: Scope) -> ASGIApp | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("the dashboard only reads\n", 405, headers={"allow": "GET, HEAD"})
        if self.token is None:
            host = headers.get("host", "").strip().lower()
            name = host[1:].split("]")[0] if host.startswith("[") else host.split(":")[0]
            return None if is_loopback(name) else PlainTextResponse("this host name is not served\n", 421)
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if self._matches(query.pop("token", "")):
            if scope["path"].startswith("/api/"):
                return None
            path = "/" + scope["path"].lstrip("/\\")  # //host/ would be another server
            answer = RedirectResponse(path + (f"?{urlencode(query)}" if query else ""), 303)
            answer.set_cookie(COOKIE, self.token, httponly=True, samesite="strict")
            return answer
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._matches(bearer) or self._matches(_cookie(headers.get("cookie", ""))):
            return None
        return PlainTextResponse("a token is needed: open the address that `weft dash` printed\n", 401)

    def _matches(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self.token or "").encode()) and bool(self.token)


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
