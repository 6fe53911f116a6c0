"""The names of torch.distributed.tensor.device_mesh. DeviceMesh is torch's own class."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
