"""The `torch.backends` entry point, which torch calls at the end of `import torch`, in every process.

It only sets hooks on the host's modules. It never raises, because `import torch` would then fail in every program. So
it is not part of the package, whose `__init__` would run first: any other file of this project may be damaged.
`MINDSPEED_CHUNK_DISABLE=1` turns it off, `TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns off all such entry points (then
`mindspeed_chunk.launch` does its work).
"""

import contextlib
import os
import sys


def autoload() -> None:
    if os.environ.get("MINDSPEED_CHUNK_DISABLE") == "1":
        return
    try:
        from mindspeed_chunk.patches import install

        install()
    except KeyboardInterrupt:  # the user wants to stop
        raise
    except BaseException as error:  # a SystemExit is no Exception
        # Not a warning, which may be an error. Without the buffer of stderr: if stderr is closed, the buffer tries
        # again at the program's end, and changes the exit code.
        with contextlib.suppress(Exception):
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            line = f"mindspeed_chunk is not available: {cause} (the package is {_folder()})\n"
            os.write(sys.stderr.fileno(), line.encode(errors="backslashreplace"))


def _folder() -> str:
    """Another copy may come before the installed one."""
    package = sys.modules.get("mindspeed_chunk")
    folders = list(getattr(package, "__path__", ())) or [os.path.join(os.path.dirname(__file__), "mindspeed_chunk")]
    return folders[0]
