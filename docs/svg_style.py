"""The common look of the pictures of docs/: a head whose fonts and colours follow light and dark."""

from __future__ import annotations

from html import escape

STYLE = """text{font-family:system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
text:not([fill]){fill:#1f2328}.page{fill:#ffffff}text.soft{fill:#59636e}.pale{fill:#eef0f2}.shade{fill:#dde1e5}.strong{fill:#123a66}
.ink{stroke:#1f2328}.solid{fill:#1f2328}.faint{stroke:#b4bac1}.grid{stroke:#dfe2e5}
text.c0{fill:#2b5c8f}text.c1{fill:#c2405a}text.c2{fill:#1b6e29}text.c3{fill:#7d6e10}
@media (prefers-color-scheme:dark){
text:not([fill]){fill:#e6edf3}.page{fill:#0d1117}text.soft{fill:#9198a1}.pale{fill:#1c222a}.shade{fill:#2a313a}.strong{fill:#a9cdf5}
.ink{stroke:#e6edf3}.solid{fill:#e6edf3}.faint{stroke:#565d66}.grid{stroke:#2b3037}
text.c0{fill:#7fb0e0}text.c1{fill:#ff93a0}text.c2{fill:#63c173}text.c3{fill:#e0d060}}"""
"""`c0` to `c3` are for text in the colours of ranks, `ink` and `faint` for lines, the others for areas."""
TITLE_SIZE = 14


def begin_svg(width: float, height: float, title: str, shown: bool = True) -> list[str]:
    """The lines that begin a picture; its title is also its first text if `shown`. A title that is longer than the
    picture widens it."""
    if shown:
        width = max(width, 24 + 0.54 * TITLE_SIZE * len(title))
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-size="12" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        '<rect class="page" width="100%" height="100%"/>',
    ]
    return [*lines, f'<text x="10" y="22" font-size="{TITLE_SIZE}">{escape(title)}</text>'] if shown else lines
