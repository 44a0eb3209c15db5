"""Names of a model's modules, from its config folder alone: built on the meta device, without weights."""

from __future__ import annotations

import functools
import logging
import warnings
from pathlib import Path


class CannotBuild(Exception):
    """One line on why."""


@functools.cache
def module_names(folder: Path) -> list[str]:
    """All names, as `named_modules` has them. Raises CannotBuild. Code that comes with the folder is not run."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise CannotBuild(f"{error.name} is not installed") from None
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            # imports the model's module, which is not to happen on the meta device
            cls = getattr(transformers, (config.architectures or [""])[0], None)
            if cls is None:
                raise CannotBuild(f"transformers {transformers.__version__} has no {config.architectures}")
            with torch.device("meta"):
                return [name for name, _ in cls(config).named_modules()]
    except CannotBuild:
        raise
    except Exception as error:  # a config that transformers cannot use fails in many ways
        raise CannotBuild(f"transformers: {(str(error).split(chr(10)) or [''])[0][:200]}") from None
