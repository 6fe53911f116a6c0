"""Reads the outputs of other communication benchmarks into the run format.

`import_logs.read_logs` finds out what a file is and reads its tables, `checks` tests them against what
their tool is known to print, `convert.to_run` makes a run of them. A log is foreign text: it may be
cut, edited, or mixed with other output, so a figure that cannot be right never becomes a time.
"""
