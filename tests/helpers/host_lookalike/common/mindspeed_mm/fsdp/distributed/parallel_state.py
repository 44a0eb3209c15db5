"""The expert-parallel mesh of this process."""

from torch.distributed import init_device_mesh

_meshes = {}


def init_parallel_state(
    data_parallel_size=1,
    fully_shard_parallel_size=1,
    tensor_parallel_size=1,
    ring_attention_size=1,
    ulysses_parallel_size=1,
    expert_parallel_size=1,
    expert_fully_shard_parallel_size=1,
    expert_data_parallel_size=1,
    **kwargs,
):
    shape = (expert_fully_shard_parallel_size, expert_parallel_size)
    _meshes["ep"] = init_device_mesh("cpu", shape, mesh_dim_names=("efsdp", "ep"))


def get_ep_device_mesh():
    return _meshes["ep"]["ep"]
