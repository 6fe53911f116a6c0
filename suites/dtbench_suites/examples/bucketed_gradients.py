"""Gradients reduced in buckets: many small reduce-scatters as a few large ones.

    torchrun --nproc-per-node 4 -m dtbench_suites.examples.bucketed_gradients

Each rank hands over its gradients as they come, and is called back with its shard of each sum. Checks itself.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from dtbench_core import ReduceScatterBucketer
from dtbench_suites.examples.launched import check, launched, say

RANKS = 4
SIZES = (100, 30, 200_000, 7, 64)  # elements of each shard; the third is larger than a bucket
BUCKET_MIB = 0.25


def main() -> None:
    with launched("bucketed_gradients", RANKS) as device:
        rank, group = dist.get_rank(), dist.group.WORLD
        assert group is not None
        bucketer = ReduceScatterBucketer(bucket_cap_mb=BUCKET_MIB)
        came: dict[int, torch.Tensor] = {}

        for k, size in enumerate(SIZES):
            # The shard for rank r of this rank's gradient k.
            shards = [torch.full((size,), float(k + r + 10 * rank), device=device) for r in range(RANKS)]
            bucketer.reduce_scatter_async(shards, group, partial(came.__setitem__, k))
        bucketer.flush()  # only now has every callback been called
        say(f"came in the order {[*came]}: the large one does not wait for a bucket to fill")
        check(sorted(came) == list(range(len(SIZES))), "one callback for each gradient")
        for k, size in enumerate(SIZES):
            expected = torch.full((size,), float(RANKS * (k + rank) + 10 * sum(range(RANKS))), device=device)
            check(torch.equal(came[k], expected), f"gradient {k}")
        bucketer.teardown()
        say(f"{bucketer.counters.collectives} collectives for {len(SIZES)} gradients")
        say("bucketed_gradients: right")


if __name__ == "__main__":
    main()
