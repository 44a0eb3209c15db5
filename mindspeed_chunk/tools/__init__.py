"""Command-line tools: `mindspeed-chunk COMMAND`, or `python -m mindspeed_chunk.tools COMMAND`."""
