"""Real text without a download: the running Python's standard library as bytes, packed to the sequence length.

A token is a byte; byte 0, which no source file contains, ends each file. The text is the same on every machine with the
same Python: modules that distributions package separately, or that describe one build, are left out.
"""

import sys
import sysconfig
from pathlib import Path

import torch

from mindspeed_chunk.config import ConfigError

VOCABULARY = 256

_NOT_EVERYWHERE = {"distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtle", "turtledemo", "venv"}
_TESTS = {"test", "tests"}


def standard_library() -> list[tuple[str, Path]]:
    """The .py files of the standard library as (relative path, Path), sorted by the former."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for name in sys.stdlib_module_names - _NOT_EVERYWHERE:  # by name: site-packages may be in this folder
        for path in (*root.glob(f"{name}.py"), *(root / name).rglob("*.py")):
            relative = path.relative_to(root)
            if not _TESTS.intersection(relative.parts):
                files.append((relative.as_posix(), path))
    return sorted(files)


class PackedText:
    """An endless stream of samples cut from the whole text: each epoch in another order, which `seed` determines."""

    def __init__(self, sequence_length: int, seed: int) -> None:
        """Raises ConfigError if the text is shorter than one sample."""
        text = b"".join(path.read_bytes() + b"\0" for _, path in standard_library())
        self.num_samples = len(text) // sequence_length
        if self.num_samples == 0:
            path = "data.dataset_param.basic_parameters.cutoff_len"
            raise ConfigError.about(path, sequence_length, f"the whole text has {len(text)} tokens", "make it shorter")
        used = text[: self.num_samples * sequence_length]
        self._samples = torch.frombuffer(bytearray(used), dtype=torch.uint8).view(self.num_samples, sequence_length)
        self._seed = seed
        self._epoch: int | None = None
        self._order: torch.Tensor

    def batch(self, first: int, size: int) -> torch.Tensor:
        """Samples number `first` to `first + size - 1` of the stream: int64 [size, sequence_length]."""
        return torch.stack([self._samples[self._index(number)] for number in range(first, first + size)]).long()

    def _index(self, number: int) -> torch.Tensor:
        epoch, position = divmod(number, self.num_samples)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.num_samples, generator=generator)
        return self._order[position]
