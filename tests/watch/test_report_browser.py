"""The report in a real browser: every plot is drawn without errors, and its data can be downloaded."""

import json
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

from weft.job.files.run_folder import RunDir
from weft.watch.journal import Journal
from weft.watch.report import write_report

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--enable-logging=stderr",
    "--window-size=1400,3000",
    "--virtual-time-budget=5000",
    "--dump-dom",
)
# as Blink counts them
DARK, LIGHT = 0, 1


class Dom(HTMLParser):
    """Parses a dumped page: the drawings of each plot, and the attributes that a probe script set on the body."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.plots: dict[str, int] = {}
        self.body: dict[str, str | None] = {}
        self._plot = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        classes = (found.get("class") or "").split()
        if tag == "body":
            self.body = found
        elif tag == "section":
            self._plot = ""
        elif "plot" in classes and tag == "div" and found.get("id"):
            self._plot = found["id"] or ""
            self.plots[self._plot] = 0
        elif tag == "svg" and self._plot:
            self.plots[self._plot] += 1


def browse(page: Path, profile: Path, scheme: int) -> tuple[Dom, str]:
    """Open a page; returns its document after scripts have run, and the browser's console."""
    out = subprocess.run(
        [
            "chromium",
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--blink-settings=preferredColorScheme={scheme}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert out.returncode == 0, out.stderr
    console = "\n".join(line for line in out.stderr.splitlines() if "CONSOLE" in line)
    return Dom(out.stdout), console


PROBE = """<script>
(async () => {
  const said = { text: getComputedStyle(document.body).color };
  let blob;
  URL.createObjectURL = (b) => { blob = b; return "data:,"; };
  HTMLAnchorElement.prototype.click = function () { said.file = this.download; };
  document.querySelector("button[data-figure]").click();
  said.data = JSON.parse(await blob.text());
  said.tick = getComputedStyle(document.querySelector(".plot .note, .plot .heading")).fill;
  said.wide = document.documentElement.scrollWidth > window.innerWidth;
  document.body.dataset.said = JSON.stringify(said);
})();
</script></body>"""


def probed(run: RunDir) -> Path:
    """The report, with a script that presses its first button and reads its colours."""
    page = write_report(run)
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    return page


def test_every_plot_of_a_whole_run_is_drawn(tmp_path: Path, make_run: Callable[..., RunDir]) -> None:
    dom, console = browse(probed(make_run(tmp_path / "run", pp=2)), tmp_path / "profile", LIGHT)
    assert console == ""
    assert list(dom.plots) == ["loss", "lr", "grad", "throughput", "mfu", "memory", "step-time", "slices"]
    assert all(count >= 1 for count in dom.plots.values()), dom.plots
    result = json.loads(dom.body["data-said"] or "{}")
    assert result["file"] == "loss.json"
    assert result["data"]["figure"] == "Loss"
    assert [s["name"] for s in result["data"]["series"]] == ["train", "train, smoothed", "validation"]
    assert len(result["data"]["series"][0]["y"]) == 120
    assert result["tick"] == result["text"] == "rgb(28, 30, 33)"
    assert not result["wide"]


def test_an_incomplete_run_in_dark_mode(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with Journal(run) as journal:
        journal.event("start", step=0)
        journal.metrics({"step": 1, "loss": float("nan"), "grad_norm": 1.5, "step_time_s": 0.1})
    held = [{"rank": 0, "offset": [0], "size": [2]}]
    named = {"name": "</script><b>", "shape": [2], "ranks": held}
    run.slices.write_text(json.dumps({"ranks": [{"rank": 0}], "axes": {}, "parameters": [named]}))
    dom, console = browse(probed(run), tmp_path / "profile", DARK)
    assert console == ""
    assert list(dom.plots) == ["grad", "step-time", "slices"]
    assert all(count >= 1 for count in dom.plots.values()), dom.plots
    result = json.loads(dom.body["data-said"] or "{}")
    assert result["data"]["figure"] == "Gradient norm"
    assert result["tick"] == result["text"] == "rgb(232, 234, 237)"


def test_a_report_on_a_phone_shows_values_and_zooms(tmp_path: Path, make_run: Callable[..., RunDir]) -> None:
    """No horizontal scrolling, requests or errors; long tables become lines, and wide figures scroll in a frame."""
    run = make_run(tmp_path / "run", layers=2, tp=8, dp_shard=4)
    page_file = write_report(run)
    problems: list[str] = []
    flags = FLAGS[1:9]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=list(flags))
        page = browser.new_page(viewport={"width": 400, "height": 800}, color_scheme="dark")
        page.set_default_timeout(120_000)
        page.on("console", lambda m: problems.append(m.text))
        page.on("pageerror", lambda e: problems.append(str(e)))
        page.on("request", lambda r: None if r.url == page_file.as_uri() else problems.append(r.url))
        page.goto(page_file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        wide = "(e) => e.getBoundingClientRect().right > innerWidth && !e.closest('.frame, .scroll, pre')"
        assert page.evaluate(f"[...document.querySelectorAll('main *')].filter({wide}).length") == 0
        loss = page.locator("#loss svg")
        expect(page.locator("#loss .title").first).to_have_text("loss")
        loss.scroll_into_view_if_needed()
        box = loss.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 200, box["y"] + 100)
        expect(page.locator("#loss .tip")).to_contain_text("train, smoothed")
        page.mouse.down()
        page.mouse.move(box["x"] + 300, box["y"] + 100)
        page.mouse.up()
        expect(page.locator("#loss .reset")).to_be_visible()
        page.locator("#loss .reset").click()
        expect(page.locator("#loss .reset")).to_have_count(0)
        page.locator("#slices .cell").first.hover()
        expect(page.locator("#slices .tip")).to_contain_text("of it")
        page.set_viewport_size({"width": 900, "height": 800})
        page.wait_for_function("document.querySelector('#loss svg').clientWidth > 700")
        browser.close()
    assert problems == []
