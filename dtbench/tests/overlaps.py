"""Which texts of a drawing lie on each other, or are cut off at its left."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from matplotlib.figure import Figure
from matplotlib.text import Text

# Of a text's box, at each side: above and below its letters it has room for accents and descenders.
SLACK_PX = 1.5


def overlapping_texts(canvas: Figure) -> list[tuple[str, str]]:
    """Pairs of texts whose boxes share more than the slack; a text that begins left of the drawing, with ""."""
    canvas.draw_without_rendering()
    scale = 72 / canvas.dpi
    boxes = []
    for text in _texts(canvas):
        box = text.get_window_extent()
        boxes.append((text.get_text(), *(scale * side for side in (box.x0, box.y0, box.x1, box.y1))))
    found = [(words, "") for words, left, *_ in boxes if left < -SLACK_PX]
    for (one, *a), (other, *b) in combinations(boxes, 2):
        across = min(a[2], b[2]) - max(a[0], b[0])
        down = min(a[3], b[3]) - max(a[1], b[1])
        if across > 2 * SLACK_PX and down > 2 * SLACK_PX:
            found.append((one, other))
    return found


def _texts(canvas: Figure) -> Iterator[Text]:
    """Those that are drawn and say something."""
    for axes in canvas.axes:
        texts = list(axes.texts)
        if axes.axison:
            texts += [*axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, axes.yaxis.label]
        yield from (text for text in texts if text.get_visible() and text.get_text().strip())
