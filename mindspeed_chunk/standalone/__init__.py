"""The embedded trainer: MindSpeed-MM's yaml, a transformers model, FSDP2 and expert parallelism, on CPUs with gloo.

It replaces MindSpeed-MM on machines without it: `torchrun -m mindspeed_chunk.standalone CONFIG.yaml`.
"""
