"""Reduces gradients in buckets: a few large reduce-scatters instead of many small ones.

    torchrun --nproc-per-node 4 -m dtbench_suites.examples.bucketed_gradients

Each rank passes its gradients to the bucketer one by one; a callback receives its shard of each sum. The program checks
its own results.
"""

from functools import partial

import torch
import torch.distributed as dist

from dtbench_core import ReduceScatterBucketer
from dtbench_suites.examples.launched import expect, launched, print_rank0

RANKS = 4
SIZES = (100, 30, 200_000, 7, 64)  # elements of each shard; the third is larger than a bucket
BUCKET_MIB = 0.25


def main() -> None:
    with launched("bucketed_gradients", RANKS) as device:
        rank, group = dist.get_rank(), dist.group.WORLD
        assert group is not None
        bucketer = ReduceScatterBucketer(bucket_cap_mb=BUCKET_MIB)
        results: dict[int, torch.Tensor] = {}

        for k, size in enumerate(SIZES):
            # Shard r of this rank's gradient k, for rank r.
            shards = [torch.full((size,), float(k + r + 10 * rank), device=device) for r in range(RANKS)]
            bucketer.reduce_scatter_async(shards, group, partial(results.__setitem__, k))
        bucketer.flush()  # all callbacks have been called
        print_rank0(
            f"callbacks in the order {[*results]}: the large gradient does not wait for a full bucket"
        )
        expect(sorted(results) == list(range(len(SIZES))), "one callback per gradient")
        for k, size in enumerate(SIZES):
            expected = torch.full((size,), float(RANKS * (k + rank) + 10 * sum(range(RANKS))), device=device)
            expect(torch.equal(results[k], expected), f"gradient {k}")
        bucketer.teardown()
        print_rank0(f"{bucketer.counters.collectives} collectives for {len(SIZES)} gradients")
        print_rank0("bucketed_gradients: right")


if __name__ == "__main__":
    main()
