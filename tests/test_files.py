"""A user's file has its old content or its new one, whole, whatever happens; what `lint --fix` does with links."""

import os
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from launcher import HANG_S
from lint_cases import CLEAN, spoilt
from mindspeed_chunk import files
from mindspeed_chunk.config import ConfigError

MISSPELT = spoilt(("enable_chunk_mbs:", "enable_chunk_mb:"))
# `lint --fix` of this writes more than a disk of 64 KiB has room for beside it
LARGE = MISSPELT + "# 注\n" * 7000


def fix(folder, config, *target, limit=None):
    """Runs the command there; returns its exit code and what it said on stderr."""
    program = "import sys; from mindspeed_chunk.tools.__main__ import main; sys.exit(main())"
    if limit is not None:
        few = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
        program = f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); {few}; {program}"
    command = [sys.executable, "-c", program, "lint", config, "--fix", *target]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG_S)
    return done.returncode, done.stderr


@contextmanager
def small_disk(folder):
    """A disk of 64 KiB where that may be had; yields the limit that files have to have elsewhere."""
    mounted = os.getuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True
    )
    if not mounted or mounted.returncode:
        yield 16 * 1024
        return
    try:
        yield None
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_old_file_whole(tmp_path):
    with small_disk(tmp_path) as limit:
        config = tmp_path / "config.yaml"
        config.write_text(LARGE, encoding="utf-8")
        for target in (["config.yaml"], []):
            code, told = fix(tmp_path, "config.yaml", *target, limit=limit)
            assert code == 2 and len(told.splitlines()) == 1
            assert told.startswith("error: --fix: 'config.") and "cannot be written: " in told
            assert config.read_text(encoding="utf-8") == LARGE and os.listdir(tmp_path) == ["config.yaml"]


@pytest.mark.parametrize("call", ["fsync", "replace", "fchmod"])
def test_an_error_at_any_moment_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call):
    path = tmp_path / "x"
    path.write_text("old")

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(ConfigError, match="^--out: '.*/x': cannot be written: No space left on device; give another"):
        files.write(path, "new", "--out")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x"]


def test_an_interrupt_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_text("old")

    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write(path, "new", "--out")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x"]


def test_the_content_is_on_the_disk_before_it_has_the_name(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        done.append(
            "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else f"file of {os.fstat(descriptor).st_size}"
        )
        fsync(descriptor)

    def replaced(*names):
        done.append("renamed")
        replace(*names)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    files.write(tmp_path / "x", "three\n", "--out")
    assert done == ["file of 6", "renamed", "folder"]


def test_a_new_file_has_the_mode_of_any_other_and_an_old_one_keeps_its_own(tmp_path):
    before = os.umask(0o027)
    try:
        files.write(tmp_path / "x", "new", "--out")
        assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640
        (tmp_path / "x").chmod(0o604)
        files.write(tmp_path / "x", b"newer", "--out")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o604 and (tmp_path / "x").read_text() == "newer"


def test_a_read_only_file_stays(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_text("old")
    monkeypatch.setattr(os, "access", lambda name, mode: False)  # as for everybody but root
    with pytest.raises(ConfigError, match="cannot be written: it is read-only; give another file"):
        files.write(path, "new", "--out")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x"]


def test_what_is_no_file_is_written_to_and_stays_what_it_is(tmp_path):
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    files.write(path, "text", "--out")
    reader.join(10)
    assert read == ["text"] and path.is_fifo()


def test_a_folder_and_a_name_that_no_file_can_have_are_one_line(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "x", tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises(ConfigError, match="^--out: .*: cannot be written: [^\n]*$"):
            files.write(path, "new", "--out")


def test_a_link_to_another_file_stays_and_that_file_is_replaced(tmp_path):
    (tmp_path / "config.yaml").write_text(MISSPELT, encoding="utf-8")
    (tmp_path / "other.yaml").write_text("old")
    (tmp_path / "link.yaml").symlink_to("other.yaml")
    assert fix(tmp_path, "config.yaml", "link.yaml") == (1, "")
    assert (tmp_path / "link.yaml").is_symlink() and (tmp_path / "config.yaml").read_text(encoding="utf-8") == MISSPELT
    assert (tmp_path / "other.yaml").read_text(encoding="utf-8") == CLEAN


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
@pytest.mark.parametrize("named", [True, False])
def test_a_link_to_the_original_is_refused_and_the_original_stays(tmp_path, kind, named):
    original, link = tmp_path / "config.yaml", tmp_path / ("link.yaml" if named else "config.fixed.yaml")
    original.write_text(MISSPELT, encoding="utf-8")
    link.symlink_to("config.yaml") if kind == "symbolic" else os.link(original, link)
    code, told = fix(tmp_path, "config.yaml", *(["link.yaml"] if named else []))
    assert code == 2 and told == (
        f"error: --fix: '{link.name}': is config.yaml through a link, and that file is written only under its own "
        "name; give another file\n"
    )
    assert original.read_text(encoding="utf-8") == MISSPELT and link.samefile(original)


def test_an_original_that_is_a_link_is_corrected_where_it_points_to(tmp_path):
    (tmp_path / "real.yaml").write_text(MISSPELT, encoding="utf-8")
    (tmp_path / "config.yaml").symlink_to("real.yaml")
    assert fix(tmp_path, "config.yaml", "./config.yaml") == (1, "")
    assert (tmp_path / "config.yaml").is_symlink() and (tmp_path / "real.yaml").read_text(encoding="utf-8") == CLEAN


def test_another_hard_link_of_what_is_replaced_keeps_the_old_content(tmp_path):
    (tmp_path / "config.yaml").write_text(MISSPELT, encoding="utf-8")
    os.link(tmp_path / "config.yaml", tmp_path / "backup.yaml")
    assert fix(tmp_path, "config.yaml", "config.yaml") == (1, "")
    assert (tmp_path / "config.yaml").read_text(encoding="utf-8") == CLEAN
    assert (tmp_path / "backup.yaml").read_text(encoding="utf-8") == MISSPELT


@pytest.mark.parametrize("how", ["w", "a"])
def test_what_goes_to_the_programs_own_output_stands_between_what_is_printed(tmp_path, how):
    log = tmp_path / "log"
    log.write_text("old\n")
    code = (
        "from pathlib import Path\nfrom mindspeed_chunk import files\n"
        "print('before')\nfiles.write(Path('/dev/stdout'), 'page\\n', '--html')\nprint('after')\n"
    )
    with log.open(how) as stdout:
        subprocess.run([sys.executable, "-c", code], stdout=stdout, check=True, timeout=HANG_S)
    assert log.read_text() == ("old\n" if how == "a" else "") + "before\npage\nafter\n"
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert piped.stdout == "before\npage\nafter\n" and piped.stderr == ""


def test_text_that_no_file_can_hold_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="--html: .*: cannot be written: "):
        files.write(tmp_path / "page", "\ud800", "--html")
