"""Long runs; see README.md here. `PYTHONPATH=tests python -m soak.fuzz`, `soak.train`, `soak.killed_rank`."""

import sys
from pathlib import Path

# pytest has it there, from pyproject.toml
sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))
