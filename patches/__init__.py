"""Seams of MindSpeed-MM, one file each; installed as `mindspeed_chunk.patches`."""
