"""The names of torch.distributed.tensor.device_mesh. The mesh is torch's."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
