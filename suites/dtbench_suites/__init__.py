"""The built-in benchmark suites, a module each, imported when it is asked for.

Reading order: `data` (what all share), then any suite; each stands alone.
"""

# What each measures, in the order in which they are listed and run; they are listed without importing torch.
SUITES = {
    "bucketer": "bucketed reduce-scatter of many small tensors",
    "collectives": "time and bandwidth of six collectives per mesh dim",
    "compile": "compiled calls of ops and blocks over DTensors, and the time to compile them (only when named)",
    "dispatch": "host latency of an op on a DTensor, by op and placements",
    "embedding": "embedding lookups in tables sharded by rows, by columns, or table by table",
    "overlap": "waiting for collectives at first use and immediately",
    "packing": "host time of packing buckets, without communication (only when named)",
    "redistribute": "time to change a DTensor's placement, per mesh dim",
    "tensor_parallel": "transformer blocks sharded over one mesh dim",
}
