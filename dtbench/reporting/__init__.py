"""The report: one HTML page of one or several launches, with its figures, tables and data inside."""

from dtbench.reporting.page import render, write_report

__all__ = ["render", "write_report"]
