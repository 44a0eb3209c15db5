"""The torch_npu wheel: without it the tests are skipped, with the reason; in CI, which sets `CI`, they fail."""

import os

import pytest

from ascend import wheel


@pytest.fixture(scope="session")
def wheel_folder():
    try:
        folder = wheel.locate()
    except FileNotFoundError as reason:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(reason))
    wheel.stand_ins(folder)
    return folder
