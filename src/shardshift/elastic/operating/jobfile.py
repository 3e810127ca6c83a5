"""How a command finds a running job of this user: a file by its name, with the address of its endpoint and the token.

1. The runtime folder is this user's alone (0700). It is opened once, without following a link, and everything in it
   goes through that descriptor: nobody can put another folder in its place between a look and a use.
2. A job holds an exclusive ``flock`` on ``NAME.lock`` for as long as its launcher lives. The kernel gives it back
   however the launcher ends, so a name is taken if and only if its job lives. The lock file stays: taking it away
   would let two launchers hold locks on two files of one name.
3. ``NAME.json`` (0600) appears by rename, whole, and goes when the job ends. One whose lock is free is a dead job's.

Process ids in place of the lock were rejected: they are given out again, and differ between containers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from ...values import Infeasible, Mismatch

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_MOST_BYTES: Final = 65536
_TRIES: Final = 10
_PAUSE_S: Final = 0.01
_OWN: Final = os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class Contact:
    """How to reach a job.

    Attributes:
        job: its name.
        url: of its endpoint.
        token: what the endpoint asks for; whoever has it may change the job's layout.
        pid: of its launcher.
    """

    job: str
    url: str
    token: str = field(repr=False)
    pid: int


class JobFile:
    """A job's name, held while this is open. Made by ``claim``.

    Attributes:
        job: the name.
        token: made for this run of the job.
    """

    def __init__(self, folder: int, lock: int, job: str) -> None:
        self._folder: int | None = folder
        self._lock = lock
        self.job = job
        self.token = secrets.token_urlsafe(32)

    @classmethod
    def claim(cls, folder: Path, job: str) -> JobFile:
        """Take a name.

        Raises:
            Infeasible: if the name cannot be one, a job of it runs already, or the folder is not this user's alone.
        """
        _require_name(job)
        descriptor = _open_folder(folder, make=True)
        lock = -1
        try:
            lock = os.open(f"{job}.lock", os.O_RDWR | os.O_CREAT | _OWN, 0o600, dir_fd=descriptor)
            if not _take_soon(lock):
                raise Infeasible(
                    f"a job named {job!r} runs already ({folder}); what to do: give this one another name, or end that "
                    "one first"
                )
            _remove(f"{job}.json", descriptor)
            return cls(descriptor, lock, job)
        except BaseException:
            if lock >= 0:
                os.close(lock)
            os.close(descriptor)
            raise

    def publish(self, url: str) -> None:
        """Write where the endpoint is, for ``find``; again if that changes."""
        assert self._folder is not None, "the job file is closed"
        record = json.dumps({"job": self.job, "url": url, "token": self.token, "pid": os.getpid()})
        part = f".{self.job}.{secrets.token_hex(8)}.part"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OWN, 0o600, dir_fd=self._folder)
        try:
            with open(descriptor, "w") as file:
                file.write(record)
            os.rename(part, f"{self.job}.json", src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            _remove(part, self._folder)
            raise

    def close(self) -> None:
        """The job ends: nobody finds it any more, and the name is free."""
        folder, self._folder = self._folder, None
        if folder is not None:
            _remove(f"{self.job}.json", folder)
            os.close(self._lock)
            os.close(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def find(folder: Path, job: str) -> Contact:
    """The job of a name.

    Raises:
        Infeasible: if none runs, with the names of those that do; or the folder is not this user's alone.
        Mismatch: if its file is not as it must be.
    """
    _require_name(job)
    with _opened(folder) as descriptor:
        record = None if descriptor is None else _record(job, descriptor)
        if record is not None and descriptor is not None:
            if _lives(job, descriptor):
                return record
            raise Infeasible(
                f"job {job!r} has ended without a word (its launcher was process {record.pid}); what to do: start it "
                "again, which takes the name over"
            )
        if descriptor is not None and _lives(job, descriptor):
            raise Infeasible(f"job {job!r} is starting, its endpoint is not there yet; what to do: try again soon")
    running = ", ".join(jobs(folder)) or "none"
    raise Infeasible(
        f"no job named {job!r} runs here ({folder}); jobs of this user that do: {running}. What to do: give one of "
        "these names, or run this on the host of the job's first agent"
    )


def jobs(folder: Path) -> list[str]:
    """The names of this user's jobs that run on this host.

    Raises:
        Infeasible: if the folder is not this user's alone.
    """
    with _opened(folder) as descriptor:
        if descriptor is None:
            return []
        names = [name.removesuffix(".json") for name in os.listdir(descriptor) if name.endswith(".json")]
        return sorted(name for name in names if _NAME.fullmatch(name) and _lives(name, descriptor))


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int | None]:
    try:
        descriptor = _open_folder(folder, make=False)
    except FileNotFoundError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_folder(folder: Path, *, make: bool) -> int:
    if make:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _OWN)
    except NotADirectoryError:  # what Linux says of a link, too
        raise _unsafe(folder, "it is a link or no folder") from None
    except PermissionError:
        raise _unsafe(folder, "it may not be opened") from None
    status = os.fstat(descriptor)
    wrong = ""
    if status.st_uid != os.geteuid():
        wrong = f"it belongs to user {status.st_uid}, not {os.geteuid()}"
    elif status.st_mode & 0o077:
        wrong = f"others have rights in it (mode {stat.S_IMODE(status.st_mode):04o}, expected 0700)"
    if wrong:
        os.close(descriptor)
        raise _unsafe(folder, wrong)
    return descriptor


def _unsafe(folder: Path, wrong: str) -> Infeasible:
    return Infeasible(
        f"{folder} cannot hold this user's jobs and their tokens: {wrong}; what to do: remove it, or name another "
        "folder (--runtime-dir)"
    )


def _require_name(job: str) -> None:
    if not _NAME.fullmatch(job):
        raise Infeasible(
            f"{job[:120]!r} cannot name a job; what to do: use up to 100 letters, digits, '.', '_' and '-', a letter "
            "or digit first"
        )


def _record(job: str, folder: int) -> Contact | None:
    try:
        descriptor = os.open(f"{job}.json", os.O_RDONLY | os.O_NONBLOCK | _OWN, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Mismatch(f"the file of job {job!r} cannot be read: {error.strerror}; what to do: remove it") from None
    with open(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise Mismatch(
                f"the file of job {job!r} is not a plain file of this user alone (0600); what to do: remove it, start "
                "the job again"
            )
        try:
            fields = json.loads(file.read(_MOST_BYTES))
            return Contact(str(fields["job"]), str(fields["url"]), str(fields["token"]), int(fields["pid"]))
        except (ValueError, KeyError, TypeError):
            raise Mismatch(
                f"the file of job {job!r} holds something else (another version wrote it?); what to do: use the "
                "shardshift that the job runs"
            ) from None


def _lives(job: str, folder: int) -> bool:
    """Whether some process holds the job's lock."""
    try:
        lock = os.open(f"{job}.lock", os.O_RDONLY | _OWN, dir_fd=folder)
    except OSError:
        return False
    try:
        return not _take(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


def _take_soon(lock: int) -> bool:
    """Take a lock for good; somebody who only looks whether it is free (``_lives``) holds it for some microseconds."""
    for _ in range(_TRIES):
        if _take(lock, fcntl.LOCK_EX):
            return True
        time.sleep(_PAUSE_S)
    return False


def _take(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
