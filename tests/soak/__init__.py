"""Long runs; see README.md here. `PYTHONPATH=tests python -m soak.fuzz`, `soak.train`, `soak.killed_rank`."""
