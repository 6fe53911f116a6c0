"""A complete distributed-tensor library in pure Python on `torch.distributed`."""
