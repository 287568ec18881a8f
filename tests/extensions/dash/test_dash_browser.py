"""The dashboard in Chromium: a live run, a second run, faults, logs, hostile text, keyboard and narrow screens."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect

from weft.job.files.run_folder import RunDir
from weft.watch.journal import Journal

HOSTILE = "<img src=x onerror=alert(1)><script>alert(1)</script>"
IMAGE = """chart => document.querySelector(`[data-chart="${chart}"] canvas`).toDataURL()"""


@contextlib.contextmanager
def opened(browser: Browser, url: str, script: str = "", **options: Any) -> Iterator[Page]:
    """A page that may not report an error, open a dialog, or send a request elsewhere; `script` runs before its own."""
    problems: list[str] = []
    with browser.new_context(**options) as context:
        context.set_default_timeout(120_000)
        context.add_init_script(script)
        page = context.new_page()
        page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: problems.append(str(e)))
        page.on("dialog", lambda d: (problems.append("a dialog"), d.dismiss()))
        page.on(
            "request", lambda r: None if r.url.startswith((url.partition("#")[0], "data:")) else problems.append(r.url)
        )
        page.goto(url)
        page.wait_for_selector("body[data-ready]")
        yield page
        assert problems == []


def record(step: int, ranks: int = 4) -> dict[str, Any]:
    busy = [0.1 + (0.06 if r == 2 else 0.001 * r) for r in range(ranks)]
    return {
        "step": step, "wall_time": 1.7e9 + step, "loss": 5.0 / step, "grad_norm": 1 + 1 / step, "lr": 1e-3 * step,
        "tokens": 64 * step, "step_time_s": 0.2 + step / 1000, "tokens_per_s": 320.0 + step, "mfu": 0.4 + step / 1000,
        "peak_memory_gib": 1.0, "gpu_power_w": 300.0 + step,
        "ranks": {"busy_s": busy, "data_s": [0.0] * ranks, "wait_s": {"tp": [0.02] * ranks},
                  "memory_gib": [1.0] * ranks},
    }  # fmt: skip


def test_a_live_run_a_fault_and_a_second_run(
    tmp_path: Path, browser: Browser, dashboard: Callable[..., Any], make_run: Callable[..., RunDir]
) -> None:
    run = RunDir(tmp_path / "live")
    with Journal(run) as journal, dashboard(tmp_path) as url:
        run.job.write_text("name: live\ntrain: {steps: 100}\n")
        run.logs.mkdir()
        (run.logs / "rank-0.log").write_text("first line\n")
        journal.event("start", step=0)
        for step in range(1, 11):
            journal.metrics(record(step))
        with opened(browser, url, viewport={"width": 1300, "height": 900}) as page:
            step_tile = page.locator(".tile dd").first
            expect(step_tile).to_contain_text("10")
            expect(page.locator(".chip.live")).to_have_text("Running")
            for title in ("Loss", "Throughput", "Step time", "Gradient norm", "Learning rate", "GPU power"):
                expect(page.locator(".card h2").filter(has_text=title).first).to_be_attached()
            before = page.evaluate(IMAGE, "loss")
            # the curve moves by itself
            for step in range(11, 51):
                journal.metrics(record(step))
            journal.event("fault", fault="nan", step=40, rank=2, why="the loss is nan at step 40 " + HOSTILE)
            expect(step_tile).to_contain_text("50")
            page.wait_for_function(f"before => ({IMAGE})('loss') !== before", arg=before)
            # the fault is a mark with its text
            box = page.locator('[data-chart="loss"] .u-over').bounding_box()
            assert box is not None
            expect(page.locator(".chip.bad")).to_have_text("1 fault")
            mark = page.locator('[data-chart="loss"] .mark').filter(has_text="fault nan at step 40")
            for turn in range(600):  # the chart may be drawn once more after a movement
                page.mouse.move(box["x"] + box["width"] * 39 / 49, box["y"] + 60 + turn % 2)
                page.wait_for_timeout(50)
                if mark.count():
                    break
            assert mark.count()
            # a second run overlays
            make_run(tmp_path / "second", steps=60)
            page.locator('#runs li[data-run="second"] input').check()
            expect(page.locator('[data-chart="loss"] .keys-line')).to_contain_text("second")
            # x axis, zoom and log scale
            page.keyboard.press("x")
            expect(page.locator(".choice [aria-pressed=true]")).to_have_text("tokens")
            page.keyboard.press("l")
            page.keyboard.press("s")
            page.get_by_role("button", name="step", exact=True).click()
            page.mouse.move(box["x"] + 100, box["y"] + 90)
            page.mouse.down()
            page.mouse.move(box["x"] + 400, box["y"] + 90)
            page.mouse.up()
            page.get_by_role("button", name="reset zoom").click()
            # ranks: the straggler is named
            page.keyboard.press("2")
            expect(page.locator("#straggler")).to_contain_text("Rank 2 is the straggler")
            # logs follow and are searched
            page.keyboard.press("4")
            expect(page.locator(".log")).to_contain_text("first line")
            with (run.logs / "rank-0.log").open("a") as log:
                log.write("WARNING a new line " + HOSTILE + "\n")
            expect(page.locator(".log .w")).to_contain_text("a new line <img")
            page.keyboard.press("/")
            page.keyboard.type("NEW")
            expect(page.locator(".log mark")).to_have_text("new")
            expect(page.locator(".log")).not_to_contain_text("first line")


DRAWN = """
window.texts = new Set(); window.dots = [];
const canvas = CanvasRenderingContext2D.prototype, { fillText, arc } = canvas;
canvas.fillText = function (text, ...at) { texts.add(text); return fillText.call(this, text, ...at); };
canvas.arc = function (x, ...more) { dots.push([x, this.fillStyle]); return arc.call(this, x, ...more); };
"""


def test_axes_have_titles_faults_are_on_top_and_steady_figures_are_folded(
    tmp_path: Path, browser: Browser, dashboard: Callable[..., Any]
) -> None:
    run = RunDir(tmp_path / "one")
    with Journal(run) as journal, dashboard(tmp_path) as url:
        journal.event("start", step=0)
        for step in range(1, 21):
            journal.metrics({**record(step), "grad_norm": 1.0})
        journal.event("fault", fault="kill", step=10, why="rank 1 was killed")
        journal.event("recovered", fault="kill", step=10, how="disk")
        with opened(browser, url, script=DRAWN, viewport={"width": 1300, "height": 2600}) as page:
            wanted = ["loss", "step", "seconds", "share of the peak", "W"]
            page.wait_for_function("wanted => wanted.every((text) => texts.has(text))", arg=wanted)
            dots = page.evaluate("dots.slice(-2)")
            assert dots[0][0] == dots[1][0] and dots[1][1] == "#b3261e", "the fault is drawn over its recovery"
            expect(page.locator("#steady summary")).to_contain_text("figures that do not change")
            page.locator("#steady summary").click()
            expect(page.locator("#steady tr").filter(has_text="Gradient norm")).to_contain_text("1")
            assert page.locator('[data-chart="grad"]').count() == 0
            page.keyboard.press("x")
            page.wait_for_function("texts.has('tokens')")


def test_the_page_waits_for_the_first_run(
    tmp_path: Path, browser: Browser, dashboard: Callable[..., Any], make_run: Callable[..., RunDir]
) -> None:
    with dashboard(tmp_path / "runs") as url, opened(browser, url) as page:
        expect(page.locator(".empty")).to_contain_text("No run here yet")
        expect(page.locator(".empty")).to_contain_text(str(tmp_path / "runs"))
        make_run(tmp_path / "runs" / "first", steps=20)
        expect(page.locator("h1")).to_have_text("first")
        expect(page.locator('[data-chart="loss"] canvas')).to_be_attached()


def test_a_pipeline_of_many_microbatches_scrolls_in_its_card(
    tmp_path: Path, browser: Browser, dashboard: Callable[..., Any], make_run: Callable[..., RunDir]
) -> None:
    run = make_run(tmp_path / "one", steps=20)
    spans = [[r, "FB"[i % 2], r, i // 2, i + r / 8, i + 1 + r / 8] for r in range(4) for i in range(256)]
    (run.path / "pipeline.json").write_text(json.dumps({"schedule": "1f1b", "measured": {"spans": spans}}))
    with (
        dashboard(tmp_path) as url,
        opened(browser, url + "/#tab=plan", script=DRAWN, viewport={"width": 400, "height": 740}) as page,
    ):
        expect(page.locator("canvas.gantt")).to_be_attached()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate("document.querySelector('canvas.gantt').clientWidth") > 4000
        assert page.evaluate("['0', '64', '127', 'rank 3'].every((text) => texts.has(text))")


def test_hostile_text_on_every_view(
    tmp_path: Path, browser: Browser, dashboard: Callable[..., Any], make_run: Callable[..., RunDir]
) -> None:
    name = "<b onmouseover=alert(1)>&amp; '\"`%0a"
    run = make_run(tmp_path / name, steps=30)
    with Journal(run) as journal:
        journal.event(HOSTILE, step=3, why=HOSTILE)
        journal.event("fault", fault=HOSTILE, step=20, why=HOSTILE)
        journal.metrics({**record(31), HOSTILE: 1.0, "gpu.<i>": {"<u>": 2}})
        journal.event("failed", why=HOSTILE)
    plan = json.loads(run.plan.read_text())
    run.plan.write_text(json.dumps({**plan, "axes": {HOSTILE: 2}, "device_name": HOSTILE, "reasons": [HOSTILE]}))
    run.job.write_text(HOSTILE)
    run.logs.mkdir()
    (run.logs / "rank-0.log").write_text(HOSTILE + "\n" + "x" * 300_000 + "\n\x1b[31mred\n")
    (run.checkpoints / "step-00000001").mkdir(parents=True)
    with dashboard(tmp_path) as url, opened(browser, url, color_scheme="dark") as page:
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        expect(page.locator("h1")).to_have_text(name)
        for key in "123456":
            page.keyboard.press(key)
            expect(page.locator("main")).not_to_be_empty()
            page.wait_for_function("document.querySelector('[aria-selected=true]')")
            assert page.evaluate("document.querySelectorAll('main img, main script, main b[onmouseover]').length") == 0
        expect(page.locator("table")).to_contain_text("step-00000001")


def test_narrow_screen_and_keyboard(
    tmp_path: Path, browser: Browser, dashboard: Callable[..., Any], make_run: Callable[..., RunDir]
) -> None:
    for i in range(3):
        make_run(tmp_path / f"run-{i}", steps=20)
    with dashboard(tmp_path) as url, opened(browser, url, viewport={"width": 380, "height": 740}) as page:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        cut = "[...document.querySelectorAll('.tile dd')].filter((e) => e.scrollWidth > e.clientWidth).length"
        assert page.evaluate(cut) == 0
        expect(page.locator("#side")).not_to_be_visible()
        page.keyboard.press("3")
        details = page.locator("tr.event td.any").first.bounding_box()
        assert details is not None
        assert details["x"] + details["width"] <= 380
        page.keyboard.press("1")
        page.locator("#menu").click()
        expect(page.locator("#runs li")).to_have_count(3)
        first = page.locator("#runs li.focus .name").inner_text()
        page.keyboard.press("j")
        expect(page.locator("#runs li.focus .name")).not_to_have_text(first)
        page.keyboard.press("?")
        expect(page.locator("#keys")).to_be_visible()
        page.keyboard.press("Escape")
        page.keyboard.press("/")
        page.locator("#menu").click()
        page.locator("#filter").fill("run-2")
        expect(page.locator("#runs li")).to_have_count(1)
        page.locator("#runs input").focus()
        page.keyboard.press("Space")
        assert page.evaluate("document.activeElement.type") == "checkbox" or page.locator("#runs input").is_checked()
