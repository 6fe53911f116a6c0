"""Do programs that use PyTorch's other machinery on DTensors come to what they do on plain tensors?

Reading order:

    program   what a program is given, and the table of all
    compiling, differentiating, memory, training, state, tools    the programs, by topic
    judge     one program on four gloo ranks against plain tensors
    suite     `dtbench run compat`

Workers, verdicts, tables and the base that must not become worse are those of the suite `coverage`.
"""

from dtbench_suites.compat.suite import compat

__all__ = ["compat"]
