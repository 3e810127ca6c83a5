"""A worker that tells the test who it is, and does what the test says. It needs no torch, so it starts at once."""

import os
import signal
import subprocess
import sys
from multiprocessing.connection import Client

PAUSE = [sys.executable, "-S", "-c", "import signal; print('there', flush=True); signal.pause()"]


def child(**how: int) -> int:
    process = subprocess.Popen(PAUSE, stdout=subprocess.PIPE, **how)  # type: ignore[call-overload]
    process.stdout.readline()
    pid: int = process.pid
    return pid


def main() -> None:
    line = Client(sys.argv[1])
    line.send((int(os.environ["RANK"]), os.getpid(), dict(os.environ)))
    while True:
        match line.recv():
            case ("exit", code):
                sys.exit(code)
            case ("child",):
                line.send(child())
            case ("child in a group of its own",):
                line.send(child(process_group=0))
            case ("on SIGTERM exit", code):
                signal.signal(signal.SIGTERM, lambda *_: None if code is None else os._exit(code))
                line.send("yes")
            case _:
                line.send("yes")


main()
