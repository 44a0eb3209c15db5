"""How the command line starts ranks: their port, and that none outlives what started it."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from mindspeed_chunk.tools import link, ranks
from soak.watched import Watched

SLEEPER = """
import os, time
from pathlib import Path
from mindspeed_chunk.tools.ranks import end_with_launcher
end_with_launcher()
Path(f"ready{os.environ['RANK']}").touch()
time.sleep(300)
"""
SMALL = ("--tokens", "16", "--hidden", "8", "--intermediate", "8", "--experts", "2", "--top-k", "1")


def test_a_reserved_port_is_free_for_a_store_and_for_nobody_else():
    with ranks.reserved_port() as port, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert dist.TCPStore("127.0.0.1", port, is_master=False).get("key") == b"value"


def test_a_failing_rank_ends_the_others(tmp_path, monkeypatch):
    code = "import os, time\nif os.environ['RANK'] == '0': time.sleep(300)\nraise SystemExit(3)\n"
    (tmp_path / "one_fails.py").write_text(code)
    monkeypatch.setattr(ranks, "_GRACE_S", 0.1)
    start = time.monotonic()
    assert ranks.launch("one_fails", [], 2, None, {"PYTHONPATH": str(tmp_path)}) == 3
    assert time.monotonic() - start < 100


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def start_sleepers(folder, watched, *before):
    """A process that has launched two ranks, which sleep by now."""
    (folder / "sleeper.py").write_text(SLEEPER)
    code = "import sys; from mindspeed_chunk.tools.ranks import launch; sys.exit(launch('sleeper', [], 2, None))"
    environment = {**os.environ, **watched.environment, "PYTHONPATH": str(folder)}
    launcher = subprocess.Popen([*before, sys.executable, "-c", code], cwd=folder, env=environment)
    wait_for(lambda: len(list(folder.glob("ready*"))) == 2)
    return launcher


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_ranks_end_with_their_launcher(number, tmp_path):
    with Watched() as watched:
        launcher = start_sleepers(tmp_path, watched)
        launcher.send_signal(number)
        assert launcher.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
        wait_for(lambda: not watched.running(), 10)


def test_a_launcher_under_nohup_goes_on(tmp_path):
    with Watched() as watched:
        launcher = start_sleepers(tmp_path, watched, "nohup")
        launcher.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(1)
        launcher.kill()
        launcher.wait()
        wait_for(lambda: not watched.running(), 10)


@pytest.mark.parametrize("command", [("bench", "--repeats", "1000000"), ("trace", "--calls", "1000000")], ids=str)
def test_no_rank_of_a_killed_command_goes_on(command, tmp_path):
    """It is killed before a rank has come to its first line."""
    with Watched() as watched:
        words = [sys.executable, "-m", "mindspeed_chunk.tools", *command, *SMALL]
        launcher = subprocess.Popen(words, cwd=tmp_path, env={**os.environ, **watched.environment})
        wait_for(lambda: len(watched.running()) == 3)
        launcher.kill()
        launcher.wait()
        wait_for(lambda: not watched.running())


def test_ctrl_c_is_answered_by_the_command_alone(tmp_path):
    """The whole group gets it; nobody tells of it, and nobody is left."""
    with Watched() as watched:
        words = [sys.executable, "-m", "mindspeed_chunk.tools", "bench", "--repeats", "1000000", *SMALL]
        launcher = subprocess.Popen(
            words, stderr=subprocess.PIPE, start_new_session=True, env={**os.environ, **watched.environment},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        wait_for(lambda: len(watched.running()) == 3)
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.communicate(timeout=30)[1] == b"" and launcher.returncode == 128 + signal.SIGINT
        assert not watched.running()


def test_a_link_takes_down_what_a_killed_command_left():
    try:
        with link.limited_link("1gbit"):
            pass
    except link.LinkError as error:
        pytest.skip(str(error))
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = [f"mc{gone.pid}n0", f"mc{os.getppid()}n7"]  # of a process that has ended, and of one that runs
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        with link.limited_link("1gbit"):
            pass
        listed = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
        assert [name in listed for name in names] == [False, True]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
