"""The documentation site: built strictly, every link leads somewhere, and ten pages in a browser."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from helpers.docs_pages import DOCS
from playwright.sync_api import Browser, sync_playwright

ROOT = DOCS.parent
SEEN = (
    "index.html", "zh/index.html", "tutorials/first-run.html", "zh/tutorials/your-text.html", "gallery.html",
    "beside-others.html", "jobs.html", "command-line.html", "python.html", "layouts.html",
)  # fmt: skip
VIEWS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "is_mobile": True},
}
CONTRAST = Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")
FOCUS = """() => {
  const e = document.activeElement
  if (!e || e === document.body) return null
  const style = getComputedStyle(e)
  return [e.outerHTML.slice(0, 80), style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1]
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n(mkdocs is in the dev extras: pip install -e '.[dev]')"
    return folder


class Parts(HTMLParser):
    """Anchors, and what a page refers to."""

    def __init__(self, text: str):
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.language = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.names |= {values[key] for key in ("id", "name") if key in values}
        if tag == "html":
            self.language = values.get("lang", "")
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(values["href"])
        elif "src" in values:
            self.loaded.append(values["src"])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Parts]:
    return {p.relative_to(site).as_posix(): Parts(p.read_text(encoding="utf-8")) for p in site.rglob("*.html")}


def test_every_page_of_docs_is_built_in_both_languages(pages: dict[str, Parts]) -> None:
    for path in DOCS.rglob("*.md"):
        name = path.relative_to(DOCS).as_posix().removesuffix(".md").removesuffix(".zh") + ".html"
        if name != "README.html":
            assert pages[name].language == "en" and pages[f"zh/{name}"].language == "zh", name


def test_every_page_has_one_place_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- (?:[^:\n]+: )?([\w/-]+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)
    written = {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md") if not p.name.endswith(".zh.md")}
    lessons = {f"lessons/{name}.md" for name in (ROOT / "lessons" / "order.txt").read_text(encoding="utf-8").split()}
    assert sorted(named) == sorted((written | lessons) - {"README.md"})


def test_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[str, Parts]) -> None:
    repository = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["repository-code"]
    for name, parts in pages.items():
        if name == "404.html" or name == "zh/404.html":
            continue
        for link in [*parts.links, *parts.loaded]:
            where = urlsplit(link)
            if where.scheme or where.netloc:
                assert link in parts.links and where.scheme in ("https", "mailto"), f"{name} loads {link}"
                if link.startswith((f"{repository}/blob/main/", f"{repository}/tree/main/")):
                    assert (ROOT / unquote(where.path).split("/main/", 1)[1]).exists(), f"{name}: {link}"
                continue
            target = (site / name).parent / unquote(where.path) if where.path else site / name
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{name} points at {link}"
            at = target.resolve().relative_to(site.resolve()).as_posix()
            if where.fragment and at in pages:
                assert unquote(where.fragment) in pages[at].names, f"{name} points at {link}"


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join(60)
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=flags)
        yield chromium
        chromium.close()


@pytest.mark.parametrize("view", VIEWS)
def test_pages_in_a_browser(view: str, address: str, browser: Browser) -> None:
    """No message on the console, no request elsewhere, no sideways scrolling, text that contrasts, visible focus."""
    problems: list[str] = []
    pictures = os.environ.get("WEFT_SITE_PICTURES")
    with browser.new_context(**VIEWS[view]) as context:
        context.set_default_timeout(120_000)
        page = context.new_page()
        page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: problems.append(str(e)))
        page.on("request", lambda r: None if r.url.startswith((address, "data:")) else problems.append(r.url))
        for name in SEEN:
            page.goto(address + name)
            page.evaluate("document.fonts.ready")
            if pictures:
                page.screenshot(path=f"{pictures}/{view}-{name.replace('/', '-').removesuffix('.html')}.png")
            assert problems == [], f"{name}: {problems}"
            scheme = page.evaluate("document.body.dataset.mdColorScheme")
            assert scheme == ("slate" if view == "dark" else "default"), name
            width = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            assert width[0] <= width[1], f"{name} is {width[0]} pixels wide on a screen of {width[1]}"
            assert page.evaluate(CONTRAST) == {}, name
            for _ in range(6):
                page.keyboard.press("Tab")
                focused = page.evaluate(FOCUS)
                assert focused and focused[1], f"{name}: no outline around {focused}"


def test_the_search_finds_a_page(address: str, browser: Browser) -> None:
    with browser.new_context(**VIEWS["light"]) as context:
        context.set_default_timeout(120_000)
        page = context.new_page()
        page.goto(f"{address}index.html?q=tensor+parallel")
        page.locator(".md-search-result__item a[href*='layouts.html']").first.wait_for(state="attached")
