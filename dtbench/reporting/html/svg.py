"""Converts matplotlib figures to inline SVG that uses the page's colours, font and ids.

matplotlib supports neither CSS variables nor several figures in one document. Figures are therefore drawn in stand-in
colours, which are replaced by `var(--name)`, so that dark mode and print can restyle them. Every id gets a prefix that
is unique to the figure.
"""

import contextlib
import html
import io
import re
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache

import matplotlib
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from dtbench.errors import plain

# CSS variable -> stand-in colour. Nothing else may be drawn in a stand-in colour.
_NAMES = ("ink", "muted", "rule", "surface", "s0", "s1", "s2", "s3", "s4", "s5")
STAND_IN = {name: f"#0a0b{0x10 + i:02x}" for i, name in enumerate(_NAMES)}

FONT_PX = 12.0
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
# Coordinates are cut to a hundredth of a pixel.
_LONG_NUMBER = re.compile(r"(\.\d\d)\d+|\s+")
_REFERENCE = re.compile(r'xlink:href="#([^"]*)"|url\(#([^)]*)\)')
_RC: dict[str, object] = {
    "svg.fonttype": "none",  # text stays text: small, selectable, read aloud
    "svg.hashsalt": "dtbench",  # makes ids reproducible
    "text.parse_math": False,  # keeps a dollar sign in a name
    "font.size": FONT_PX,
    "axes.unicode_minus": False,
    "lines.markersize": 4.5,
    "axes.edgecolor": STAND_IN["rule"],
    "axes.labelcolor": STAND_IN["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": STAND_IN["rule"],
    "xtick.color": STAND_IN["rule"],
    "ytick.color": STAND_IN["rule"],
    "xtick.labelcolor": STAND_IN["muted"],
    "ytick.labelcolor": STAND_IN["muted"],
    "text.color": STAND_IN["ink"],
}


@lru_cache(maxsize=4096)
def text_px(text: str) -> float:
    """Returns the width of a text in DejaVu Sans, which is wider than most fonts that browsers use."""
    font = FontProperties(family="DejaVu Sans", size=FONT_PX)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Context with the settings of all figures, independent of the user's matplotlibrc. Entered once per page."""
    # rcdefaults first, since a user's matplotlibrc must not affect a report.
    with matplotlib.rc_context(), warnings.catch_warnings():
        # Names may contain letters that matplotlib's font lacks; the browser uses its own font.
        warnings.filterwarnings("ignore", message=r"(?s).*Glyph .* missing from")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)  # type: ignore[arg-type]  # its stubs want literal keys
        yield


def draw(
    width_px: float,
    height_px: float,
    paint: Callable[[Figure], None],
    *,
    prefix: str,
    title: str = "",
    desc: str = "",
) -> Markup:
    """Returns the SVG of what `paint` draws on a figure of this size; one unit is one CSS pixel. Needs `settings`.

    Args:
        prefix: prefix of ids, unique in the page; letters and digits.
        title: title for screen readers, which skip the figure if it is "".
        desc: description for screen readers.
    """
    figure = Figure(figsize=(width_px / 72, height_px / 72))
    FigureCanvasSVG(figure)
    paint(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    return Markup(_adopt(buffer.getvalue(), width_px, height_px, prefix, title, desc))


def _adopt(svg: str, width: float, height: float, prefix: str, title: str, desc: str) -> str:
    body = svg[svg.index("<g id=") : svg.rindex("</svg>")]
    # matplotlib's style element would apply to the whole page.
    body = re.sub(r"<style\b.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    referred_to = {href or url for href, url in _REFERENCE.findall(body)}
    body = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in referred_to else "", body)
    for pattern, replacement in (
        (r'\bid="([^"]*)"', rf'id="{prefix}-\1"'),
        (r'\bxlink:href="#([^"]*)"', rf'href="#{prefix}-\1"'),
        (r"url\(#([^)]*)\)", rf"url(#{prefix}-\1)"),
        (r"font-family: [^;\"]*;? ?", ""),
        (r' transform="rotate\(-0 [^"]*\)"', ""),
        (r">\s+<", "><"),
        *((stand_in, f"var(--{name})") for name, stand_in in STAND_IN.items()),
    ):
        body = re.sub(pattern, replacement, body)
    body = re.sub(
        r'(?<= )(d|x|y|transform)="[^"]*"', lambda m: _LONG_NUMBER.sub(lambda n: n[1] or " ", m[0]), body
    )
    opening = f'<svg class="plot" viewBox="0 0 {width:g} {height:g}"'
    if not title:
        return f'{opening} aria-hidden="true">{body}</svg>'
    return (
        f'{opening} role="img" aria-labelledby="{prefix}-t {prefix}-d">'
        f'<title id="{prefix}-t">{html.escape(plain(title))}</title>'
        f'<desc id="{prefix}-d">{html.escape(plain(desc))}</desc>{body}</svg>'
    )
