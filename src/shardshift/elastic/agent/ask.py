"""Questions between agents, without the job's store: one line of JSON there, one back, over a connection each.

As open to whoever can reach it as the job's store is; the name of the job keeps jobs apart, nothing more.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

Address = tuple[str, int]
Record = Mapping[str, Any]

_ANSWER_S: Final = 1.0
_MOST_BYTES: Final = 1 << 26


class Answering:
    """Answers questions, in threads of its own.

    Args:
        address: of this host, as others reach it.
        answer: gives the answer to a question; None for none.

    Attributes:
        address: where others ask.
    """

    def __init__(self, address: str, answer: Callable[[Record], Record | None]) -> None:
        class Handler(socketserver.StreamRequestHandler):
            timeout = _ANSWER_S  # seconds that whoever asks may be silent

            def handle(self) -> None:
                with suppress(OSError, ValueError):
                    asked = json.loads(self.rfile.readline(_MOST_BYTES))
                    given = answer(asked) if isinstance(asked, dict) else None
                    if given is not None:
                        self.wfile.write(json.dumps(given).encode() + b"\n")

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

        self._server = Server((address, 0), Handler)
        self.address: Address = (address, self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="shardshift-answers", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@dataclass(frozen=True, slots=True)
class Heard:
    """What came of a question.

    Attributes:
        answers: by whom it was answered.
        dead: where nothing listens any more: the host is there, and says that the process is not.
    """

    answers: Mapping[int, Record]
    dead: Collection[int]


def ask_all(addresses: Mapping[int, Address], question: Record) -> Heard:
    """Ask several at once; whoever has not answered in a second has not."""
    if not addresses:
        return Heard({}, ())
    with ThreadPoolExecutor(len(addresses)) as pool:
        asked = {number: pool.submit(_ask, address, question) for number, address in addresses.items()}
        heard = {number: future.result() for number, future in asked.items()}
    answers = {number: answer for number, answer in heard.items() if isinstance(answer, dict)}
    return Heard(answers, tuple(number for number, answer in heard.items() if answer == "dead"))


def _ask(address: Address, question: Record) -> Record | str | None:
    try:
        with socket.create_connection(address, _ANSWER_S) as line:
            line.sendall(json.dumps(question).encode() + b"\n")
            with line.makefile("rb") as stream:
                answer = json.loads(stream.readline(_MOST_BYTES))
                return answer if isinstance(answer, dict) else None
    except ConnectionRefusedError:
        return "dead"
    except (OSError, ValueError):
        return None
