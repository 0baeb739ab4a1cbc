"""A control program of MPS for tests: a true daemon that is started, found by its directory, asked, told to quit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from zico.base.mps import CONTROL

if TYPE_CHECKING:
    from pathlib import Path

_PROGRAM = """#!{interpreter} -IS
import os, signal, sys
how = {how!r}
pipes = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
control = os.path.join(pipes, "control")

def note(text):
    with open({notes!r}, "a") as notes:
        notes.write(text + "\\n")

def serve():
    if how != "same session":
        os.setsid()
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note("daemon %d sees %s" % (os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")))
    os.mkfifo(control)
    os.write(ready, b"r")
    os.close(ready)
    while True:
        with open(control) as told:
            word = told.read().strip()
        note(word)
        if word == "quit" and how != "deaf":
            break

if sys.argv[1:] == ["-d"]:
    if how == "fails":
        print("first words")
        sys.exit("cannot find a GPU")
    if how == "hangs":
        signal.pause()
    if how != "leaves":
        told, ready = os.pipe()
        if not os.fork():
            serve()
            os._exit(0)
        os.close(ready)
        os.read(told, 1)
        if how == "complains":
            sys.exit(3)
else:
    word = sys.stdin.read()
    if word.startswith("get_"):
        if how == "hangs":
            signal.pause()
        answers = dict(line.split(":") for line in open({notes!r} + "-answers"))
        print(answers[word.strip()], end="")
        sys.exit(0)
    if word.startswith("terminate_client"):
        for line in word.splitlines():
            note(line + (" lives" if os.path.exists("/proc/" + line.split()[2] + "/root") else " is dead"))
        if how == "hangs at the end":
            signal.pause()
        sys.exit(0)
    with open(control, "w") as daemon:
        daemon.write(word)
"""


def name_clients(notes: Path, *pids: int) -> int:
    """Let the daemon be the server of these clients; returns its process number."""
    server = int(notes.read_text().split()[1])
    answers = f"get_server_list:{server}\nget_client_list {server}:{' '.join(map(str, pids))}\n"
    notes.with_name("notes-answers").write_text(answers)
    return server


def install(directory: Path, how: str = "") -> Path:
    """Put the program into the directory; return the file in which its daemon notes what it is told.

    Args:
        directory: To be put on PATH.
        how: ``deaf``: the daemon heeds neither quit nor SIGTERM; ``same session``: it stays in the
            session in which it was started; ``leaves``: there is none; ``complains``: ``-d`` fails
            although there is one; ``fails`` and ``hangs``: so does ``-d``; ``hangs at the end``: it
            never tells that it has ended a client's work.
    """
    directory.mkdir(exist_ok=True)
    notes = directory / "notes"
    notes.touch()
    program = directory / CONTROL
    program.write_text(_PROGRAM.format(interpreter=sys.executable, how=how, notes=str(notes)))
    program.chmod(0o755)
    return notes
