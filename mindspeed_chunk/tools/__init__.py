"""Command-line tools: `python -m mindspeed_chunk.tools.bench`."""
