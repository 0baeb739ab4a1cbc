"""Scripts that start where what they import is loaded: a framework takes two to seven seconds of a processor.

``warm.py serve FRAMEWORK SOCKET`` loads a framework and what a job calls, and forks a process for
each script. For ``bare torch`` it leaves the adapter to the script, which joins by its import. For
``broker`` it loads what a broker imports and calls. ``warm.py SOCKET SCRIPT
ARGUMENTS`` stands in for that process: it gives its standard streams, ends as the script ends, and
takes the script along when it is killed. ``harness.warm`` starts the server.

A script sees a fork of an interpreter that has imported the framework and used nothing of it. What
PyTorch imports when its first optimizer is made is loaded, too.
Adapters are enabled as for a framework that was imported before Zico.
"""

from __future__ import annotations

import marshal
import os
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LARGEST = 1 << 17
"""Bytes of a request: arguments, environment, directory."""
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def wait(path: str, arguments: list[str]) -> None:
    """Have a script run, and end as it ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _LARGEST)
        connection.connect(path)
        request = marshal.dumps((arguments, dict(os.environ), os.getcwd()))  # noqa: PTH109 - pathlib is not loaded
        socket.send_fds(connection, [request], [0, 1, 2])
        code = int(connection.recv(16) or b"70")
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


class Server:
    """Forks a process for each request."""

    def __init__(self, path: str) -> None:
        """Listen."""
        import selectors

        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(16)
        self._stand_ins: dict[int, socket.socket] = {}
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)  # closed when whoever has started this is gone

    def next_script(self) -> tuple[list[str], dict[str, str], str]:
        """Serve; returns, in a process of its own each, what a script is told."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    request = self._accept()
                    if request is not None:
                        return request
                elif key.fileobj == 0:
                    os._exit(0)
                elif isinstance(key.fileobj, int):
                    self._ended(key.fileobj, key.data)
                else:
                    self._killed(key.data)

    def _accept(self) -> Any:  # noqa: ANN401 - marshalled
        """Fork; returns the request in the child, and nothing in this process."""
        import ctypes
        import selectors
        import signal

        connection, _ = self._listener.accept()
        request, streams, _, _ = socket.recv_fds(connection, _LARGEST, 3)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(70)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            for key in list(self._selector.get_map().values()):
                if not isinstance(key.fileobj, int):
                    key.fileobj.close()  # type: ignore[union-attr]
                elif key.fileobj:
                    os.close(key.fileobj)
            self._selector.close()
            connection.close()
            return marshal.loads(request)  # noqa: S302 - from a test
        for stream in streams:
            os.close(stream)
        self._stand_ins[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, pid)
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        return None

    def _ended(self, pidfd: int, pid: int) -> None:
        """Tell how a script has ended."""
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._selector.unregister(pidfd)
        os.close(pidfd)
        stand_in = self._stand_ins.pop(pid, None)
        if stand_in is not None:
            self._selector.unregister(stand_in)
            stand_in.send(str(code).encode())
            stand_in.close()

    def _killed(self, pid: int) -> None:
        """Kill a script whose stand-in is dead."""
        import signal

        stand_in = self._stand_ins.pop(pid, None)
        if stand_in is not None:
            self._selector.unregister(stand_in)
            stand_in.close()
            os.kill(pid, signal.SIGKILL)


def load(what: str) -> None:
    """Load what a job in a pool needs, or a broker; what it does with it is its own."""
    from importlib import import_module

    os.environ["ZICO"] = "off"  # an adapter's import joins; the job's own environment takes this one's place
    if what == "broker":
        import_module("zico.broker.__main__")
    else:
        framework = what.removeprefix("bare ")
        import_module(framework)
        if what == "torch":
            import_module("torch._dynamo")  # by the first optimizer of a process: a second of a processor
        if what == framework:
            import_module(f"zico.adapters.{'torch' if what == 'torch' else 'tensorflow'}")
    from zico.base.warming import BROKERS, JOBS
    from zico.base.warming import load as load_programs

    load_programs(*(BROKERS if what == "broker" else JOBS))


def keep() -> None:
    """Leave all that is loaded out of collections of garbage: a script walks, and copies, only what it has made."""
    import gc

    gc.collect()
    if "triton" not in sys.modules:  # at the end its bindings print what no collection has freed
        gc.freeze()


def become(arguments: list[str], environment: dict[str, str], directory: str) -> None:
    """Run a script as Python does, in a process that ``zico run`` has started if the environment says so."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        setattr(sys, name, open(number, mode, buffering=1, closefd=False))  # noqa: SIM115 - a descriptor
    if "PYTHONFAULTHANDLER" in environment:
        import faulthandler

        faulthandler.enable()
    sys.argv[:] = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))  # noqa: PTH100, PTH120
    if "ZICO_SOCKET" in environment:
        from zico.job import autoload

        autoload.install()
    script: dict[str, Any] = sys.modules["__main__"].__dict__
    script["__file__"] = arguments[0]
    with open(arguments[0]) as file:  # noqa: PTH123
        source = file.read()
    exec(compile(source, arguments[0], "exec", dont_inherit=True), script)  # noqa: S102 - what Python does with a script


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        load(sys.argv[2])
        keep()
        become(*Server(sys.argv[3]).next_script())
    else:
        wait(sys.argv[1], sys.argv[2:])
