"""Draws the pictures of docs/memory-tiers.md: python docs/make_tiers.py"""

from __future__ import annotations

from pathlib import Path

from svg_style import begin_svg

HERE = Path(__file__).parent
DEVICE, HOST, DISK, PASS = "#4477aa", "#228833", "#aa8833", "#888888"
BOXES = (
    ("device", DEVICE,
     ("weights in bf16", "gradients", "activations of the blocks that run", "slots for 3 pieces and more")),
    ("host memory", HOST,
     ("moments", "low halves of master weights", "moving averages", "inputs, gradients, weights of blocks")),
    ("disk (memory.disk)", DISK,
     ("moments and low halves that host", "memory cannot hold", "one preallocated file a rank")),
)  # fmt: skip
ARROWS = (("fetch", "store"), ("read ahead", "write behind"))
"""Between neighbouring boxes: to the device, and from it."""


def homes() -> str:
    """What lives where, and the copies between the memories."""
    width, height, gap, left, top = 240, 130, 110, 10, 10
    out = []
    for column, (name, colour, lines) in enumerate(BOXES):
        x = left + column * (width + gap)
        out.append(
            f'<rect x="{x}" y="{top}" width="{width}" height="{height}" rx="6" fill="{colour}" fill-opacity="0.12" '
            f'stroke="{colour}"/><text x="{x + 12}" y="{top + 24}" font-weight="bold">{name}</text>'
        )
        out += [f'<text x="{x + 12}" y="{top + 48 + 20 * row}">{line}</text>' for row, line in enumerate(lines)]
    for column, (inward, outward) in enumerate(ARROWS):
        x = left + width + column * (width + gap)
        for y, text, begin, end in ((50, inward, gap - 8, 8), (100, outward, 8, gap - 8)):
            out.append(
                f'<path d="M{x + begin} {top + y}H{x + end}" class="ink" marker-end="url(#head)"/>'
                f'<text x="{x + gap / 2:g}" y="{top + y - 6}" text-anchor="middle">{text}</text>'
            )
    arrow = (
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
        '<path class="solid" d="M0 0L7 3L0 6z"/></marker></defs>'
    )
    title = "What lives on the device, in host memory and on disk"
    opening = begin_svg(left * 2 + 3 * width + 2 * gap, top * 2 + height, title, shown=False)
    return "\n".join([*opening, arrow, *out, "</svg>"]) + "\n"


UNITS = 4
QUEUES = ("computation", "fetch", "store", "disk read", "disk write")
FORWARD, BACKWARD, UPDATE, COPY, READ, WRITE = 2.0, 4.0, 0.5, 1.5, 1.8, 2.0
"""Time of a unit in each queue."""
Bar = tuple[str, float, float, str, str]
"""Queue, begin, end, label and colour; an update has neither."""


def timeline() -> list[Bar]:
    """One step from its backward passes to the next forward passes: a unit is updated right before its forward pass."""
    bars: list[Bar] = []
    end = dict.fromkeys(QUEUES, 0.0)

    def put(queue: str, after: float, length: float, label: str, colour: str) -> float:
        begin = max(after, end[queue])
        end[queue] = begin + length
        bars.append((queue, begin, end[queue], label, colour))
        return end[queue]

    for unit in range(UNITS, 0, -1):
        put("computation", 0, BACKWARD, f"backward {unit}", PASS)
    norm = end["computation"]
    arrived = {}
    for unit in range(1, UNITS + 1):
        # two units are on the device when the step begins; a slot is free again after a store
        ahead = norm - 3.4 + 0.9 * unit if unit <= 2 else norm + (unit - 2) * (UPDATE + FORWARD) - 1
        read = put("disk read", ahead - READ, READ, f"{unit}", DISK)
        arrived[unit] = put("fetch", read, COPY, f"{unit}", HOST)
    for unit in range(1, UNITS + 1):
        updated = put("computation", max(norm, arrived[unit]), UPDATE, "", "")
        put("computation", updated, FORWARD, f"forward {unit}", PASS)
        stored = put("store", updated, COPY, f"{unit}", HOST)
        put("disk write", stored, WRITE, f"{unit}", DISK)
    return bars


def queues() -> str:
    """The time line of the five queues."""
    unit, row, left, top = 28, 28, 100, 30
    bars = timeline()
    last = max(end for _, _, end, _, _ in bars)
    out = []
    for index, queue in enumerate(QUEUES):
        out.append(f'<text x="10" y="{top + index * row + 18}">{queue}</text>')
    for queue, begin, end, label, colour in bars:
        x, y = left + begin * unit, top + QUEUES.index(queue) * row
        look = f'fill="{colour}" fill-opacity="0.55"' if colour else 'class="strong"'
        out.append(
            f'<rect x="{x:.1f}" y="{y + 4}" width="{(end - begin) * unit - 1:.1f}" height="{row - 8}" rx="2" {look}/>'
        )
        middle = x + (end - begin) * unit / 2
        out.append(f'<text x="{middle:.1f}" y="{y + 18}" text-anchor="middle" font-size="11">{label}</text>')
    norm = left + UNITS * BACKWARD * unit
    bottom = top + row * len(QUEUES)
    out.append(
        f'<path d="M{norm:g} {top - 6}V{bottom}" class="ink" stroke-dasharray="3 3"/>'
        f'<text x="{norm:g}" y="{top - 10}" text-anchor="middle">the gradient norm is known</text>'
        f'<rect x="{left}" y="{bottom + 8}" width="12" height="12" rx="2" class="strong"/><text x="{left + 18}" '
        f'y="{bottom + 18}">the update of a unit, right before its next forward pass; numbers are units</text>'
    )
    begin_lines = begin_svg(left + last * unit + 10, bottom + 30, "The five queues of one step", shown=False)
    return "\n".join([*begin_lines, *out, "</svg>"]) + "\n"


def images() -> dict[Path, str]:
    """Every picture and its content."""
    return {HERE / "images" / "tiers-homes.svg": homes(), HERE / "images" / "tiers-queues.svg": queues()}


if __name__ == "__main__":
    for path, picture in images().items():
        path.write_text(picture, encoding="utf-8")
