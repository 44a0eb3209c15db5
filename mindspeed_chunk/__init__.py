"""Chunk MoE for MindSpeed-MM: the all-to-all of one chunk of tokens runs while the experts of its neighbour compute.

Importing the package changes nothing and imports neither torch nor the host.
"""

from mindspeed_chunk.config import ChunkMBSConfig, ChunkMoEConfig, ConfigError

__all__ = ["ChunkMBSConfig", "ChunkMoEConfig", "ConfigError", "__version__"]

# setup.py reads this line as text.
__version__ = "0.1.0"
