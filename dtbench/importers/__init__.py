"""Converts the outputs of other communication benchmarks to run files.

`import_logs.read_logs` recognizes the format of a file and reads its tables. `checks` compares their measurements with
the formulas of the tool. `convert.to_run` makes a run of the tables. A log may be cut, edited, or mixed with other
output, so a measurement that fails a check never becomes a time.
"""
