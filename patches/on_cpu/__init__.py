"""MindSpeed-MM on a CPU, for tests, demos and examples; imported only with `MINDSPEED_CHUNK_DEVICE=cpu`."""
