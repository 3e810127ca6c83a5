"""Where requests come from besides HTTP: a watched file, a signal; and several sources as one.

A file and a signal post on the board, so that all requests of a job stand in one order, are decided by one rule, and
outlive the process that they came to.

How a file is read:

1. A look costs one ``stat``; only if file, size or time of change differ from the last look is it read.
2. Whoever writes it writes another file and renames it. Against those who do not: a line that has no end yet is taken
   only if the next look finds the file unchanged, and a file that changes while it is read is read at the next look.
3. What is posted is noted in the store under the file's name, so a rank that becomes the lead does not post again what
   an earlier lead has posted. A file says what layout is wanted: one that is there at the start counts.

inotify was rejected: it says nothing of files on NFS, and of a Kubernetes volume only that its links changed; one
``stat`` a step is cheap.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import queue
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

import torch.distributed as dist

from ...values import ShardshiftError
from ..resize import Resize, ResizeSource
from .board import Board
from .request import Request

Say: TypeAlias = Callable[[str], None]

_log: Final = logging.getLogger(__name__)
_MOST_BYTES: Final = 4096
_Seen: TypeAlias = tuple[int, int, int, int]


class FileSource:
    """Posts what a watched file asks for: one line, ``pp4tp2dp1`` or ``devices 6``; ``#`` begins a comment.

    As a ``ResizeSource`` it looks between two steps, on the lead's host, and leaves the announcing to a
    ``BoardSource`` beside it; an agent may call ``look`` by itself.

    Args:
        path: the file; it need not be there.
        board: of the job.
        say: is told of what cannot be read or understood, once for each content; None: a warning in the log.
    """

    alike = False

    def __init__(self, path: Path, board: Board, say: Say | None = None) -> None:
        self._path, self._board = path, board
        self._say: Say = say or _log.warning
        self._key = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]
        self._read: _Seen | None = None
        self._unended: _Seen | None = None
        self._said = ""

    def upcoming(self, iteration: int) -> Resize | None:
        """Look at the file; what it asks for comes through the board."""
        self.look()
        return None

    def settled(self, resize: Resize, refusal: ShardshiftError | None) -> None:
        """Nothing: the board answers."""

    def moved(self, store: dist.Store) -> None:
        """From now on the board is in another store."""
        self._board = Board(store)

    def look(self) -> int | None:
        """Post what the file asks for, if that is new.

        Returns:
            The number of the request; None if there is none.
        """
        try:
            status = os.stat(self._path)
            seen = _seen(status)
            if seen == self._read:
                return None
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is no plain file")
            content = self._content(seen)
        except FileNotFoundError:
            self._read = None
            return None
        except OSError as error:
            self._tell(f"{self._path}: {error.strerror or error}; it is looked at again")
            return None
        if content is None:
            return None
        self._read, self._unended = seen, None
        return self._post(content, seen)

    def _content(self, seen: _Seen) -> bytes | None:
        """All that the file holds; None if it is being written."""
        # Not blocking: opening a pipe that has just taken the file's place would stop training.
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            content = os.read(descriptor, _MOST_BYTES + 1)
            if _seen(os.fstat(descriptor)) != seen:
                return None
        finally:
            os.close(descriptor)
        if content and not content.endswith(b"\n") and self._unended != seen:
            self._unended = seen
            return None
        return content

    def _post(self, content: bytes, seen: _Seen) -> int | None:
        try:
            if len(content) > _MOST_BYTES:
                raise ShardshiftError(f"it is longer than {_MOST_BYTES} bytes")
            lines = [line.partition("#")[0].strip() for line in content.decode().splitlines()]
            wanted = [line for line in lines if line]
            if len(wanted) > 1:
                raise ShardshiftError(f"it has {len(wanted)} lines, expected one")
            if not wanted:
                return None
            request = Request.parse(wanted[0])
            # By time and content, not by inode: the next lead may see the file through another mount.
            mark = f"{seen[2]}:{hashlib.sha256(content).hexdigest()}"
            if self._board.mark_of(self._key) == mark:
                return None
            number = self._board.post(request)
            self._board.mark(self._key, mark)
        except dist.DistError as error:  # a store that is lost: nothing that a peer has done
            self._read = None
            self._tell(f"{self._path} could not be posted, and is looked at again: {str(error).partition(chr(10))[0]}")
            return None
        except (ShardshiftError, UnicodeDecodeError) as error:
            self._tell(f"{self._path} is ignored until it changes: {error}")
            return None
        return number

    def _tell(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)


class Sources:
    """Several sources as one: of what they announce, the change that is due first; of equals, the first source's.

    All are asked each time, so one that only looks (``FileSource``) may stand anywhere. A script that knows of a change
    in a thousand steps thus does not keep a request waiting.

    Args:
        sources: in order.
    """

    alike = False

    def __init__(self, *sources: ResizeSource) -> None:
        self._sources = sources

    def upcoming(self, iteration: int) -> Resize | None:
        """See ``ResizeSource``."""
        announced = [resize for source in self._sources if (resize := source.upcoming(iteration)) is not None]
        return min(announced, key=lambda resize: resize.iteration, default=None)

    def settled(self, resize: Resize, refusal: ShardshiftError | None) -> None:
        """Tell all: a source knows its own changes; two that announced the same one have both got it."""
        for source in self._sources:
            source.settled(resize, refusal)

    def moved(self, store: dist.Store) -> None:
        """Tell those that use the job's store that it is another one."""
        for source in self._sources:
            if (moved := getattr(source, "moved", None)) is not None:
                moved(store)


@contextlib.contextmanager
def posting_on(
    signals: tuple[signal.Signals, ...], board: Board, request: Request, say: Say | None = None
) -> Iterator[threading.Event]:
    """While this is open, the first of some signals posts a request, at once and from any rank.

    For launchers that are not ours: ``srun --signal=USR1@60`` reaches every process of a step, and only one of them is
    the lead, so a source that waits to be asked would mostly wait in vain. The handler only raises a flag; a thread
    posts, since the signal may have interrupted the store's own client in the middle of a request.

    Args:
        signals: which.
        board: of the job; with a store client of its own, as another thread uses it.
        request: what to ask for, such as that this process's devices leave within the grace.
        say: is told what was posted, or why not; None: the log.

    Yields:
        An event that is set once the request is posted, or was refused.

    Raises:
        ValueError: outside of the main thread, where Python allows no handlers.
    """
    tell: Say = say or _log.warning
    # put() of a SimpleQueue may be called again while a call of it is interrupted; an Event's set() may not.
    flags: queue.SimpleQueue[int] = queue.SimpleQueue()
    posted = threading.Event()

    def serve() -> None:
        number = flags.get()
        if not number:
            return
        try:
            tell(f"signal {number}: posted as request {board.post(request)}")
        except Exception as error:  # a thread has nobody to raise to
            tell(f"signal {number}: could not be posted: {type(error).__name__}: {error}")
        posted.set()

    thread = threading.Thread(target=serve, name="shardshift-signal", daemon=True)
    before = {number: signal.signal(number, lambda received, frame: flags.put(received)) for number in signals}
    thread.start()
    try:
        yield posted
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from Python
        flags.put(0)
        thread.join()


def _seen(status: os.stat_result) -> _Seen:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
