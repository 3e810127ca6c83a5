"""A store that answers within a limit, or raises.

torch's stores bound their waits, but not the single request: where the host of the store is stopped (not killed),
``check`` blocks in C++ for as long as that lasts, and the caller with it. So requests are made by a thread, and the
caller waits for the answer no longer than the limit. After one that did not come, nothing is asked any more: requests
are answered in order, so the thread is still waiting for the first.

That costs two switches between threads a request, some 50 us.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Final, cast

import torch.distributed as dist

_PATIENCE_S: Final = 2.0
_ASKED: Final = ("add", "append", "check", "compare_set", "delete_key", "get", "multi_get", "set")


class AnsweringStore:
    """A store in front of another one; it has the requests that the control plane makes, and ``clone``.

    Args:
        store: the store.
        limit_s: the longest that a request may take.

    Raises:
        torch.distributed.DistStoreError: from each request, once one was not answered in time.
    """

    def __init__(self, store: dist.Store, limit_s: float, line: _Line | None = None) -> None:
        self._store, self._limit_s = store, limit_s
        self._line, self._is_part = line or _Line(), line is not None

    def __getattr__(self, name: str) -> Any:
        if name not in _ASKED:
            raise AttributeError(name)
        request = getattr(self._store, name)
        return lambda *arguments: self._ask(lambda: request(*arguments))

    @classmethod
    def over(cls, store: dist.Store, timeout_s: float) -> dist.Store:
        """One that answers within a job's timeout and 2 s: a host that is merely busy was seen to take 5 s."""
        return cast(dist.Store, cls(store, timeout_s + _PATIENCE_S))  # it has all that is asked of it

    def clone(self) -> AnsweringStore:
        """Another client of the same store, for another thread."""
        made = self._ask(lambda: self._store.clone())  # type: ignore[attr-defined]  # the stub lacks it
        return AnsweringStore(made, self._limit_s)

    def under(self, prefix: str) -> dist.Store:
        """A part of the store; its requests are made by the same thread."""
        return cast(dist.Store, AnsweringStore(dist.PrefixStore(prefix, self._store), self._limit_s, self._line))

    def close(self) -> None:
        """End the thread, if it does not wait for an answer; a part leaves that to the whole."""
        if not self._is_part:
            self._line.close()

    def _ask(self, request: Callable[[], Any]) -> Any:
        return self._line.ask(request, self._limit_s)


class _Line:
    """A thread that makes requests, one after the other."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._silent = False
        # A daemon: one that waits for a stopped host must not keep the process from ending.
        self._thread = threading.Thread(target=_serve, args=(self._requests,), name="shardshift-store", daemon=True)
        self._thread.start()

    def ask(self, request: Callable[[], Any], limit_s: float) -> Any:
        """The answer to a request, if it comes in time."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if not self._silent:
            self._requests.put((request, answer))
            try:
                result, error = answer.get(timeout=limit_s)
            except queue.Empty:
                self._silent = True
            else:
                if error is not None:
                    raise error
                return result
        raise dist.DistStoreError(f"the store did not answer within {limit_s:g} s")

    def close(self) -> None:
        """Make no more requests."""
        silent, self._silent = self._silent, True  # from now on nothing is answered
        self._requests.put(None)
        if not silent:
            self._thread.join()


def part_of(store: dist.Store, prefix: str) -> dist.Store:
    """A part of a store, which answers as the store does."""
    return store.under(prefix) if isinstance(store, AnsweringStore) else dist.PrefixStore(prefix, store)


def close_store(store: dist.Store) -> None:
    """End the thread of a store that has one."""
    if isinstance(store, AnsweringStore):
        store.close()


def _serve(requests: queue.SimpleQueue[Any]) -> None:
    """The life of the thread. It holds no reference to the store's owner, so that one can be collected."""
    while (asked := requests.get()) is not None:
        request, answer = asked
        try:
            answer.put((request(), None))
        except BaseException as error:
            answer.put((None, error))
        del request, answer, asked
