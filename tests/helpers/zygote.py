"""A process that has torch imported and forks on request: a rank then costs milliseconds, and not an import of torch.

It also imports what the ranks' functions need, each module once. It never has a second thread and runs nothing but
imports, so that a fork of it is as good as a fresh process with the same environment.
"""

import atexit
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback

# What torch imports late: with the first deterministic algorithm (2.13), or the first checkpoint (2.7).
LATE_IMPORTS = ("torch._dynamo", "torch._inductor.config")
BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); import zygote; zygote.main()"
MESSAGE_BYTES = 1 << 17
FORK, ENDED, REAP = "fork", "ended", "reap"


class Zygote:
    """The parent's view of one. It ends with the parent, whose end closes the connection."""

    def __init__(self, environment):
        self.environment = environment
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, json.dumps(absolute_path())],
                env=environment,
                stdin=theirs,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._lock = threading.Lock()  # for launches of several threads
        atexit.register(self.close)

    @property
    def ended(self):
        return self._process.poll() is not None

    def fork(self, call, variables, descriptors, imports=(), path=()):
        """A process that calls `call`: [module, function, arguments], and leads a process group of its own.

        variables: added to its environment.
        descriptors: its stdin, stdout and stderr.
        imports: modules that the zygote imports first, if it has not.
        path: in front of this process's `sys.path`.
        """
        job = {"call": call, "variables": variables, "imports": imports, "folder": os.getcwd()}
        return Forked(self, self._ask(FORK, {**job, "path": [*path, *absolute_path()]}, *descriptors))

    def _ask(self, what, about, *descriptors):
        try:
            with self._lock:
                socket.send_fds(self._connection, [json.dumps([what, about]).encode()], descriptors)
                answer = self._connection.recv(MESSAGE_BYTES)
        except OSError:
            answer = None
        except BaseException:
            self.close()  # the answer would be taken for that to the next question
            raise
        if not answer:
            raise RuntimeError(f"the zygote has ended with exit code {self._process.wait()}")
        answer = json.loads(answer)
        if isinstance(answer, str):
            self.close()  # the next launch makes a new one
            raise RuntimeError(answer)
        return answer

    def close(self):
        """End it. Its children have connections of their own."""
        self._process.kill()
        self._connection.close()
        self._process.wait()


class Forked:
    """A child of a zygote."""

    def __init__(self, zygote, pid):
        self._zygote = zygote
        self.pid = pid

    def ended(self):
        """Whether it has; it stays unreaped, so that its group id cannot be anybody else's."""
        return self._zygote._ask(ENDED, self.pid)

    def reap(self):
        """Wait for its end; the exit code, as in `subprocess`."""
        return self._zygote._ask(REAP, self.pid)


def stop(processes):
    """Kill these, each with its group; their exit codes, in order. Raises, after all, where one cannot be had."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    codes, problems = [], []
    for process in processes:
        try:
            codes.append(process.reap())
        except RuntimeError as problem:
            problems.append(problem)
    if problems:
        raise problems[0]
    return codes


def alive(pid):
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children_of(pid):
    """Process ids; none where there is no such process."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            return [int(child) for child in children.read().split()]
    except OSError:
        return []


def absolute_path():
    """`sys.path`, for a process in any folder."""
    return [os.path.abspath(entry) for entry in sys.path]


def main():
    """The life of a zygote; a child leaves `_serve` with what it is to call."""
    for module in LATE_IMPORTS:
        importlib.import_module(module)
    call = _serve(socket.socket(fileno=0))
    _end(0 if call is None else _run(*call))


def _run(module, function, arguments):
    """The exit code of a program that calls the function."""
    try:
        getattr(importlib.import_module(module), function)(*arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    else:
        return 0
    return 1


def _end(code):
    """As children of `multiprocessing` do: to take down all modules, with torch among them, takes a second."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(connection):
    """Answer until the parent is gone; in a child, return what it is to call."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        if not message:
            return None
        what, about = json.loads(message)
        try:
            answer = _answer(what, about)
        except OSError as error:
            answer = f"{what} {about}: {error}"
        if what == FORK and answer == 0:
            return _become(about, connection, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(json.dumps(answer).encode())


def _answer(what, about):
    if what == FORK:
        return _fork(about)
    if what == ENDED:
        return os.waitid(os.P_PID, about, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return os.waitstatus_to_exitcode(os.waitpid(about, 0)[1])


def _fork(job):
    """The child's id, 0 in the child, or as text why there is none."""
    sys.path[:] = job["path"]
    os.chdir(job["folder"])
    for module in job["imports"]:
        with contextlib.suppress(BaseException):  # the child tries again, and tells
            importlib.import_module(module)
        if len(os.listdir("/proc/self/task")) > 1:
            return f"after the import of {module} there are threads, so that nothing can be forked"
    child = os.fork()
    # in both processes: neither may run ahead of it
    os.setpgid(child, 0)
    return child


def _become(job, connection, *descriptors):
    connection.detach()
    for own, descriptor in enumerate(descriptors):
        os.dup2(descriptor, own)
        os.close(descriptor)
    os.environ.update(job["variables"])
    # a process's own, as Python's is after a fork
    importlib.import_module("torch").default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    return job["call"]
