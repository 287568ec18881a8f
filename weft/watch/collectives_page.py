"""The HTML page of `weft bench collectives`: bus bandwidth over message size, one line a collective or algorithm."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from weft.watch.figures.figure import Figure
from weft.watch.html_page import card, esc, section, write_page

COLOURS = ("@blue", "@orange", "@green", "@purple", "#CCBB44", "#EE6677", "#44AA99", "#882255", "@quiet")
Data = dict[str, Any]


def write_collectives_page(path: Path, data: Data) -> Path:
    """Write the page for the output of `weft bench collectives --json`."""
    first = data["rows"][0]
    dtype, rows = first["dtype"], [r for r in data["rows"] if r["axis"] == first["axis"]]
    native = [r for r in rows if r["algorithm"] == "native" and r["dtype"] == dtype]
    by_hand = [r for r in rows if r["kind"] == "all_reduce" and r["dtype"] == dtype]
    dtypes = [r for r in rows if (r["kind"], r["algorithm"]) == (first["kind"], "native")]
    same = (first["kind"], first["algorithm"], dtype)
    axes = [r for r in data["rows"] if (r["kind"], r["algorithm"], r["dtype"]) == same]
    drawn = [
        figure("kinds", f"Every collective, by the backend, {dtype}", native, "kind"),
        figure("algorithms", f"All-reduce by every algorithm, {dtype}", by_hand, "algorithm"),
        figure("dtypes", f"{first['kind']} by dtype", dtypes, "dtype"),
        *([figure("axes", f"{first['kind']} by axis, {dtype}", axes, "axis")] if len(axes) > len(rows) else []),
    ]
    where = f"{data['ranks']} ranks over {data['backend']} on {data['device']}, torch {data['torch']}"
    header = f"""<header><div class="top"><h1>Collectives</h1></div><p>{esc(where)}</p>
<p class="meta">bus bandwidth as nccl-tests define it; the table holds the fits of time = α + β · bytes</p></header>"""
    return write_page(path, "collectives", "\n".join([header, *(card(f) for f in drawn if f.data), table(data)]))


def figure(name: str, title: str, rows: list[Data], by: str) -> Figure:
    """Bus bandwidth over size on logarithmic axes; hovering shows the time too."""
    traces = []
    for i, (label, group) in enumerate(groupby(rows, lambda r: r[by])):
        some = list(group)
        traces.append(
            {"type": "scatter", "mode": "lines+markers", "name": label, "x": [r["bytes"] for r in some],
             "y": [r["busbw_gb_s"] for r in some], "line": {"color": COLOURS[i % len(COLOURS)], "width": 2},
             "hovertext": [f"{label}: {r['bytes']:,} bytes in {r['seconds'] * 1e6:,.1f} µs, {r['busbw_gb_s']:.3g} GB/s"
                           for r in some]}
        )  # fmt: skip
    layout = {
        "showlegend": True, "xaxis": {"type": "log", "title": {"text": "bytes"}},
        "yaxis": {"type": "log", "title": {"text": "bus bandwidth, GB/s"}},
    }  # fmt: skip
    return Figure(name, title, "", traces, layout, height=420)


def table(data: Data) -> str:
    """The table of fitted α and β."""
    cells = "".join(
        f"<tr><td>{esc(x['axis'])}</td><td>{esc(x['kind'])}</td><td>{esc(x['algorithm'])}</td><td>{esc(x['dtype'])}</td>"
        f"<td>{x['alpha_s'] * 1e6:.1f}</td><td>{x['beta_s_per_byte'] * 1e9:.4f}</td>"
        f"<td>{'–' if x['busbw_gb_s'] is None else format(x['busbw_gb_s'], '.3f')}</td></tr>"
        for x in data["lines"]
    )
    head = "".join(f"<th>{h}</th>" for h in ("axis", "collective", "by", "dtype", "α µs", "β ns/byte", "bus GB/s"))
    return section("Fits", f'<div class="scroll"><table class="list"><tr>{head}</tr>{cells}</table></div>')
