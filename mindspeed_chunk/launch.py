"""Runs a script of the host with the patches, for environments in which torch does not load them.

torchrun ... -m mindspeed_chunk.launch mindspeed_mm/fsdp/train/trainer.py CONFIG.yaml [key=value ...]
"""

import os
import runpy
import sys

from mindspeed_chunk.patches import install


def main() -> int:
    if len(sys.argv) < 2:
        print("usage: python -m mindspeed_chunk.launch SCRIPT.py [ARGUMENTS ...]", file=sys.stderr)
        return 2
    script = sys.argv[1]
    if not os.path.isfile(script):
        print(f"mindspeed_chunk.launch: {script}: no such file", file=sys.stderr)
        return 2
    install()
    sys.argv = sys.argv[1:]
    # as Python does for a script; with -P (or -I) it adds neither the current folder nor the script's
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
