"""The built-in benchmark suites."""
