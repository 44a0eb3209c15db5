"""What every test shares: surroundings that are the same wherever the tests are started; figures at a run's end."""

import os
import re

import pytest

# What a shell, a scheduler or torchrun may have set, and what results or their form depend on. Where Python is found
# stays, and so do paths of checkouts and of torch_npu's wheel.
INHERITED = re.compile(
    r"(MINDSPEED_CHUNK|TORCH|TORCHELASTIC|LC)_(?!TORCH_NPU).*|(\w+_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|NON_MEGATRON"
    r"|LANG|LANGUAGE|COLUMNS|LINES|TERM|TTY_\w+|(NO|FORCE)_COLOR"
    r"|PYTHON(DEVMODE|HASHSEED|IOENCODING|OPTIMIZE|SAFEPATH|UNBUFFERED|UTF8|WARNINGS)"
)


def pytest_sessionstart():
    for name in list(filter(INHERITED.fullmatch, os.environ)):
        del os.environ[name]
    # one thread, so that ranks and tests do not fight for the cores
    os.environ |= {"OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    # torch 2.7.1 starts a process for each core when Inductor is imported, as torch_npu does
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.umask(0o022)


@pytest.fixture(autouse=True)
def environment_stays():
    """What a test sets, or a library in it (torch.compile: its cache's folder), ends with the test."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def pytest_terminal_summary(terminalreporter):
    """What passed tests told by `record_property`; what they print stays unseen, and with it what a worker prints."""
    told = [pair for report in terminalreporter.getreports("passed") for pair in report.user_properties]
    if told:
        terminalreporter.section("figures")
    for name, value in told:
        terminalreporter.write_line(f"{name}: {value}")
