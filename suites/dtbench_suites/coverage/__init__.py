"""Is every op right on distributed tensors? torch's own op database over placements, core beside torch.

Reading order:

    samples  an op's sample arguments, and the placements they are tried in
    judge    one case: the op on four simulated ranks against the plain op
    worker   a process that judges ops, so that a crash in native code costs one op's verdict
    pool     the workers: hands out ops, watches the time
    table    verdicts per op and mode: tables, the committed file, what became worse
    suite    `dtbench run coverage`
"""
