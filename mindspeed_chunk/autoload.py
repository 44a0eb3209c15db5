"""Version 0.1.0's entry point. An editable install of it keeps this name until it is installed again."""

import runpy
from pathlib import Path

# by its place: such an install does not know the module's name
autoload = runpy.run_path(str(Path(__file__).resolve().parents[1] / "mindspeed_chunk_autoload.py"))["autoload"]
