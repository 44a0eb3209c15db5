"""The text of the embedded trainer: only Python's own library, the same each time, every sample to one rank."""

import sys

import pytest
import torch

from mindspeed_chunk.config import ConfigError
from mindspeed_chunk.standalone.data import VOCABULARY, PackedText, standard_library

LENGTH = 128


@pytest.fixture(scope="module")
def data():
    return PackedText(LENGTH, seed=5)


def test_only_what_ships_with_python_everywhere():
    names = [name for name, _ in standard_library()]
    assert names == sorted(set(names))
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    for name in names:
        assert name.split("/")[0].removesuffix(".py") in sys.stdlib_module_names
        assert not {"site-packages", "dist-packages", "test", "tests", "__pycache__"} & set(name.split("/")), name
        assert not name.startswith(("_sysconfigdata", "sitecustomize", "ensurepip", "idlelib")), name


def test_tokens_are_the_files_bytes_and_an_end(data):
    samples = data._samples.flatten().tolist()
    _, first = standard_library()[0]
    content = first.read_bytes()
    assert bytes(samples[: len(content) + 1]) == content + b"\0"
    assert all(b"\0" not in path.read_bytes() for _, path in standard_library())
    assert max(samples) < VOCABULARY


def test_the_same_seed_gives_the_same_stream_and_another_does_not(data):
    batch = data.batch(40, 6)
    assert batch.shape == (6, LENGTH) and batch.dtype == torch.int64
    assert torch.equal(batch, PackedText(LENGTH, seed=5).batch(40, 6))
    assert not torch.equal(batch, PackedText(LENGTH, seed=6).batch(40, 6))
    assert torch.equal(batch[2:4], data.batch(42, 2))


def test_an_epoch_holds_each_sample_once_and_the_next_another_order():
    data = PackedText(65536, seed=5)
    count = data.num_samples
    first, second = data.batch(0, count), data.batch(count, count)
    assert sorted(first.tolist()) == sorted(second.tolist())
    assert not torch.equal(first, second)
    assert torch.equal(data.batch(count - 1, 2), torch.stack([first[-1], second[0]]))
    assert len({bytes(row) for row in first.tolist()}) == count


def test_longer_than_the_text():
    with pytest.raises(ConfigError, match="the whole text has"):
        PackedText(10**9, seed=0)
