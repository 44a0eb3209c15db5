"""Chunk MoE: the tokens of one MoE layer in chunks, the all-to-all of one behind the experts of its neighbour."""
