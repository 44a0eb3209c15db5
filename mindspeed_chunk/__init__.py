"""Chunk MoE for MindSpeed-MM: the all-to-all of one chunk of tokens runs while the experts compute the next one.

Importing the package changes nothing. It imports neither torch nor the host nor its own modules, because every
`import torch` imports it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed_chunk.config import ChunkMBSConfig, ChunkMoEConfig, ConfigError

__all__ = ["ChunkMBSConfig", "ChunkMoEConfig", "ConfigError", "__version__"]

# setup.py reads this line as text.
__version__ = "0.1.0"

if not TYPE_CHECKING:  # a type checker reports a name that does not exist as an error

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from mindspeed_chunk import config

        return getattr(config, name)
