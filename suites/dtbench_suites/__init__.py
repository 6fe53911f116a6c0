"""The built-in benchmark suites: one module per suite, imported on demand.

Read `data` first, which all suites share, then any suite.
"""

# Suite -> its one-line description. The order is that of listing and running. Listing suites does not import torch.
SUITES = {
    "bucketer": "bucketed reduce-scatter of many small tensors",
    "collectives": "time and bandwidth of seven collectives per mesh dim",
    "compile": "compiled calls of ops and blocks over DTensors, and the time to compile them (only when named)",
    "dispatch": "host latency of an op on a DTensor, by op and placements",
    "embedding": "embedding lookups in tables sharded by rows, by columns, or table by table",
    "expert_parallel": "dispatch and combine of an expert layer, by routing (only when named)",
    "fsdp": "host time of a step with sharded parameters, by groups and parameters (only when named)",
    "overlap": "waiting for collectives at first use and immediately",
    "packing": "host time of packing buckets, without communication (only when named)",
    "payload": "collectives sent in a narrower dtype, with the conversion (only when named)",
    "redistribute": "time to change a DTensor's placement, per mesh dim",
    "tensor_parallel": "transformer blocks sharded over one mesh dim",
}
