"""Random programs on distributed tensors, compared with the same programs on plain ones; what differs is minimised.

Reading order:

    generate  a program: inputs, statements, which of them are compiled; its text
    judge     the text on four ranks against plain tensors
    minimise  the shortest program that goes wrong in the same way
    __main__  `python -m dtbench_suites.fuzz --seed 1 --minutes 5`

A program is a text of Python that uses `tensor`, `index`, `mesh`, `move` and `compiled` of `judge.names`. What it comes
to is every tensor that has a name at its end, and the gradients of its inputs. It is executed twice: the second time,
the core has all its ops planned.
"""
