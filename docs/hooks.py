"""Hook of mkdocs that keeps indented lines of a command's help on separate lines."""

from __future__ import annotations

import re
import textwrap

_LINES = re.compile(r"<p>([^<\n]*:)\n((?:  [^<]*?\n?)+)</p>")


def on_page_content(html: str, **_: object) -> str:
    """`Examples:` and the commands below it, of which Markdown makes one paragraph."""
    return _LINES.sub(
        lambda of: f"<p>{of[1]}</p>\n<pre><code>{textwrap.dedent(of[2]).rstrip()}</code></pre>", html
    )
