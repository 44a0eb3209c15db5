"""The expert-parallel mesh of this process."""

from torch.distributed import init_device_mesh

_meshes = {}


def init_parallel_state(parallel):
    shape = (parallel.expert_fully_shard_parallel_size, parallel.expert_parallel_size)
    _meshes["ep"] = init_device_mesh("cpu", shape, mesh_dim_names=("efsdp", "ep"))


def get_ep_device_mesh():
    return _meshes["ep"]["ep"]
