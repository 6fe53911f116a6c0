"""Data frames as CSV that is safe to open in a spreadsheet."""

from typing import TYPE_CHECKING

from dtbench.errors import plain

if TYPE_CHECKING:
    import pandas as pd


def to_csv(frame: "pd.DataFrame", float_format: str | None = None) -> str:
    """Formats a header and one line per row, without control characters."""

    def safe_cell(value: object) -> object:
        """Puts a quote before text that a spreadsheet would take for a formula."""
        if not isinstance(value, str):
            return value
        # The characters of https://owasp.org/www-community/attacks/CSV_Injection; `plain` has removed tabs and line
        # ends.
        text = plain(value)
        return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text

    unsafe = [
        name
        for name, column in frame.select_dtypes(["string", "object"]).items()
        if any(safe_cell(value) != value for value in column.dropna().unique())
    ]
    return (
        frame.assign(**{str(name): frame[name].map(safe_cell) for name in unsafe})
        .rename(columns=plain)
        .to_csv(index=False, lineterminator="\n", float_format=float_format)
    )
