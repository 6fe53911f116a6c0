"""Data frames as CSV that is safe to open in a spreadsheet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtbench.errors import plain

if TYPE_CHECKING:
    import pandas as pd


def of_frame(frame: pd.DataFrame, float_format: str | None = None) -> str:
    """A head, then a line per row: text is spelled without control characters."""

    def shown(value: object) -> object:
        """With a quote before what would be taken for a formula."""
        if not isinstance(value, str):
            return value
        # https://owasp.org/www-community/attacks/CSV_Injection names these, and the tab and line ends.
        text = plain(value)
        return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text

    texts = frame.select_dtypes(["string", "object"])
    harmful = [
        name for name, of in texts.items() if any(shown(value) != value for value in of.dropna().unique())
    ]
    safe = frame.assign(**{str(name): frame[name].map(shown) for name in harmful}).rename(columns=plain)
    return safe.to_csv(index=False, lineterminator="\n", float_format=float_format)
