"""The `torch.backends` entry point, which torch calls at the end of its own import, in every process.

It sets hooks on the host's modules and does nothing else. It never raises: `import torch` would fail for everybody.
`MINDSPEED_CHUNK_DISABLE=1` turns it off, `TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns off all such entry points (then
`mindspeed_chunk.launch` does its work).
"""

import os
import warnings


def autoload() -> None:
    try:
        from mindspeed_chunk.patches import install

        install()
    except Exception as error:
        # the folder: another copy may come before the installed one
        package = f"the package is {os.path.dirname(__file__)}"
        warnings.warn(f"mindspeed_chunk is not available: {type(error).__name__}: {error} ({package})", stacklevel=2)
