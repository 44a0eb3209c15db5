"""How the command line starts ranks: their port, and that none outlives what started it."""

import os
import signal
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from launcher import HANG_S, wait_for
from mindspeed_chunk.tools import link, ranks
from soak.interrupted import WITH_DEFAULTS
from soak.watched import Watched

SLEEPER = """
import os, time
from pathlib import Path
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
    code = "import os, time\nif os.environ['RANK'] == '0': time.sleep(3000)\nraise SystemExit(3)\n"
    (tmp_path / "one_fails.py").write_text(code)
    monkeypatch.setattr(ranks, "_GRACE_S", 0.1)
    assert ranks.launch("one_fails", [], 2, None, {"PYTHONPATH": str(tmp_path)}) == 3


def test_a_rank_answers_signals_as_usual_but_for_ctrl_c(tmp_path):
    """What its launcher holds back while it starts ranks is not held back in them."""
    code = (
        "import os, signal, sys\n"
        "held, kinds = signal.pthread_sigmask(signal.SIG_BLOCK, ()), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)\n"
        "told = [not held, sys.argv[1:], *(signal.getsignal(kind).name for kind in kinds)]\n"
        "open(os.environ['RANK'], 'w').write(str(told))\n"
    )
    (tmp_path / "tells.py").write_text(code)
    launched(tmp_path, f"os.chdir({str(tmp_path)!r}); ranks.launch('tells', ['word'], 2, None)")
    for rank in "01":
        assert (tmp_path / rank).read_text() == str([True, ["word"], "SIG_IGN", "SIG_DFL", "SIG_DFL"])


def launched(folder, code):
    """What a process prints that has the defaults of signals and runs the code, with `folder` on its path."""
    code = f"import os, signal, subprocess, sys\nfrom mindspeed_chunk.tools import link, ranks\n{code}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    command = [*WITH_DEFAULTS, sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Gets a request, the first or one more, at each start of a process: of a rank, or of what makes and deletes a link.
INTERRUPTED = """
started, start = [], subprocess.Popen

def interrupted(command, **options):
    started.append(start(command, **options))
    os.kill(os.getpid(), signal.{name})
    return started[-1]

def states():
    return [signal.pthread_sigmask(signal.SIG_BLOCK, ()), *map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))]

before = states()
subprocess.Popen = interrupted
try:
    ranks.launch("sleeper", [], 2, {rate!r})
except SystemExit as end:
    ended = [process.poll() is not None for process in started]
    print(end.code, len(started), all(ended), states() == before, os.getpid())
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_request_while_ranks_are_started_is_not_lost(name, tmp_path):
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(3)\n")
    code, *told, _ = launched(tmp_path, INTERRUPTED.format(name=name, rate=None)).split()
    assert (int(code), *told) == (128 + getattr(signal, name), "1", "True", "True")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_requests_at_each_step_of_making_and_deleting_a_link_leave_none(name, tmp_path):
    if_links()
    code, count, *told, pid = launched(tmp_path, INTERRUPTED.format(name=name, rate="1gbit")).split()
    assert (int(code), *told) == (128 + getattr(signal, name), "True", "True") and int(count) > 10
    for what in ("netns", "link"):
        assert f"mc{pid}" not in subprocess.run(["ip", what], capture_output=True, text=True, check=True).stdout


def start_sleepers(folder, watched, *before):
    """A process that has launched two ranks, which sleep by now."""
    (folder / "sleeper.py").write_text(SLEEPER)
    code = "import sys; from mindspeed_chunk.tools.ranks import launch; sys.exit(launch('sleeper', [], 2, None))"
    environment = {**os.environ, **watched.environment, "PYTHONPATH": str(folder)}
    launcher = subprocess.Popen([*WITH_DEFAULTS, *before, sys.executable, "-c", code], cwd=folder, env=environment)
    wait_for(lambda: len(list(folder.glob("ready*"))) == 2)
    return launcher


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_ranks_end_with_their_launcher(number, tmp_path):
    with Watched() as watched:
        launcher = start_sleepers(tmp_path, watched)
        launcher.send_signal(number)
        assert launcher.wait(HANG_S) == (-number if number == signal.SIGKILL else 128 + number)
        wait_for(lambda: not watched.running())


def test_a_launcher_under_nohup_goes_on(tmp_path):
    with Watched() as watched:
        launcher = start_sleepers(tmp_path, watched, "nohup")
        launcher.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(1)
        launcher.kill()
        launcher.wait()
        wait_for(lambda: not watched.running())


@pytest.mark.parametrize("command", [("bench", "--repeats", "100000"), ("trace", "--calls", "1000")], ids=str)
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
        words = [sys.executable, "-m", "mindspeed_chunk.tools", "bench", "--repeats", "100000", *SMALL]
        environment = {**os.environ, **watched.environment}
        launcher = subprocess.Popen(
            [*WITH_DEFAULTS, *words], stderr=subprocess.PIPE, start_new_session=True, env=environment
        )
        wait_for(lambda: len(watched.running()) == 3)
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.communicate(timeout=HANG_S)[1] == b"" and launcher.returncode == 128 + signal.SIGINT
        assert not watched.running()


def if_links():
    try:
        with link.limited_link("1gbit"):
            pass
    except link.LinkError as error:
        pytest.skip(str(error))


def test_a_link_takes_down_what_a_killed_command_left():
    if_links()
    gone = subprocess.Popen(["true"])
    gone.wait()
    # of a process that has ended, of one that had this one's number, and of one that runs
    names = [f"mc{gone.pid}n0", f"mc{os.getpid()}n7", f"mc{os.getppid()}n7"]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        with link.limited_link("1gbit"):
            pass
        listed = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
        assert [name in listed for name in names] == [False, False, True]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
