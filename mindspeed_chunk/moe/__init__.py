"""Chunk MoE: the tokens of one MoE layer in chunks; the all-to-all of one runs while experts compute another one."""
