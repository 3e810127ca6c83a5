"""The control endpoint: HTTP on loopback, in the launcher's process, through which a job is asked and watched.

=========================  =================================================================================
``GET /status``            the lead's status record; 503 before there is one
``POST /resize``           a request (``request.py``) as JSON; 202 and ``{"request": n}``
``GET /requests/<n>``      what became of it; 404 if there is none
``GET /metrics``           in Prometheus' text format; 404 if the job has none
=========================  =================================================================================

Every answer but ``/metrics`` is a JSON object, an error's is ``{"error": text}``. All need ``Authorization: Bearer
TOKEN``: loopback keeps out other hosts, not other users of this one, and not a web page that somebody has open here.

1. The token is looked at first, in constant time, before path and body; so who has none learns nothing.
2. A body needs a length, of 64 KiB at most, and is read only after that was looked at.
3. A connection ends with its answer, after 10 s without a byte, or after 30 s; more than 16 at a time are cut at once.
4. The log has method, path (one of the four) and status; never headers, queries or bodies.

The standard library's ``ThreadingHTTPServer`` serves it: four paths, some requests a minute, inside a process that
trains. What it lacks (points 2, 3) is a few lines here. Flask, FastAPI or aiohttp would bring five to twenty packages
into every training environment.

Without TLS the token passes in the clear, which is why no other host is listened to unless that is asked for; then put
a tunnel or a proxy with TLS in front.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import logging
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, Self

import torch.distributed as dist

from ...values import Infeasible, ShardshiftError
from .board import Board
from .request import Request

_log: Final = logging.getLogger(__name__)
_MOST_BODY_BYTES: Final = 65536
_DRAINED_BYTES: Final = 2**20
_MOST_CONNECTIONS: Final = 16
_PATIENCE_S: Final = 10.0
_LONGEST_S: Final = 30.0
_POLL_S: Final = 0.25
_PATHS: Final = re.compile(r"/status|/resize|/metrics|/requests/([0-9]{1,9})", re.ASCII)
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Endpoint:
    """Serves a job's board over HTTP until it is closed; use it as a context manager.

    Args:
        board: the job's; its store is asked from several threads, which torch's stores allow.
        token: what a request has to bring.
        metrics: gives the text of ``/metrics`` for a status record, or None where there is none yet.
        host: the address to listen on; one of another host's reach only where the user asks for it.
        port: 0 for any that is free.

    Raises:
        Infeasible: if the address cannot be listened on.
    """

    def __init__(
        self,
        board: Board,
        token: str,
        metrics: Callable[[Mapping[str, Any] | None], bytes] | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        if len(token) < 16:
            raise Infeasible("a token of less than 16 characters can be guessed; what to do: use JobFile.token")
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise Infeasible(
                f"the control endpoint cannot listen on {host} port {port}: {error.strerror or error}; what to do: "
                "name an address of this host and a free port, or port 0"
            ) from None
        self._server.desk = _Desk(board, token.encode(), metrics)
        self._host = host
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="shardshift-endpoint", daemon=True
        )
        if not _is_loopback(host):
            _log.warning("the control endpoint listens on %s, and its token passes in the clear", host)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it is, e.g. ``http://127.0.0.1:41235``."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_port}"

    def use(self, board: Board) -> None:
        """Serve another board from now on: the job's store has moved to another host."""
        desk = self._server.desk
        self._server.desk = _Desk(board, desk.token, desk.metrics)

    def close(self) -> None:
        """Listen no more, and cut the connections that are open."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class _Desk:
    """What requests are answered from."""

    def __init__(self, board: Board, token: bytes, metrics: Callable[[Mapping[str, Any] | None], bytes] | None) -> None:
        self.board, self.token, self.metrics = board, token, metrics

    def status(self) -> Mapping[str, Any]:
        status = self.board.status()
        if status is None:
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, "it does not train yet; what to do: ask again later")
        return status

    def resize(self, body: bytes) -> Mapping[str, Any]:
        try:
            record = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from None
        try:
            request = Request.from_json(record)
        except ShardshiftError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, str(error)) from None
        try:
            return {"request": self.board.post(request)}
        except Infeasible as error:
            raise _Refused(HTTPStatus.TOO_MANY_REQUESTS, str(error)) from None

    def answer(self, number: int) -> Mapping[str, Any]:
        answer = self.board.answer(number)
        if answer is None:
            raise _Refused(HTTPStatus.NOT_FOUND, f"there is no request {number}")
        return answer.to_json()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a connection that hangs must not keep the launcher from ending
    desk: _Desk

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._open: dict[socket.socket, float] = {}  # and when it began
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's own, which looks the host's name up: seconds, where a resolver does not answer.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def service_actions(self) -> None:
        """Called between polls: cut who has had their time, however slowly they drip."""
        now_s = time.monotonic()
        for connection, began_s in list(self._open.items()):
            if now_s - began_s > _LONGEST_S:
                _cut(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def server_close(self) -> None:
        super().server_close()
        for connection in list(self._open):
            _cut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a connection to the control endpoint broke", exc_info=True)

    def _forget(self, request: socket.socket) -> None:
        self._open.pop(request, None)
        self._free.release()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "shardshift", ""
    timeout = _PATIENCE_S

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = do_GET

    def _answer(self) -> None:
        kind, extra = "application/json", {}
        try:
            self._authenticate()
            status, content = self._route(self.path.partition("?")[0])
            if isinstance(content, bytes):
                kind = _METRICS_TYPE
            else:
                content = json.dumps(content).encode()
        except _Refused as refused:
            status, content = refused.status, json.dumps({"error": refused.text}).encode()
            if status == HTTPStatus.UNAUTHORIZED:
                extra["WWW-Authenticate"] = 'Bearer realm="shardshift"'
            self._drain()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **extra}.items():
            self.send_header(name, value)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _authenticate(self) -> None:
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        # As bytes: compare_digest refuses texts that are not ASCII.
        right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self.server.desk.token)
        if not right or scheme.lower() != "bearer":
            raise _Refused(HTTPStatus.UNAUTHORIZED, "a token is needed: Authorization: Bearer TOKEN")

    def _route(self, path: str) -> tuple[HTTPStatus, Mapping[str, Any] | bytes]:
        desk = self.server.desk
        method = "POST" if path == "/resize" else "GET"
        known = _PATHS.fullmatch(path)
        if not known:
            raise _Refused(HTTPStatus.NOT_FOUND, "there are /status, /resize, /requests/<number> and /metrics")
        if self.command != method:
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"use {method}")
        try:
            if path == "/resize":
                return HTTPStatus.ACCEPTED, desk.resize(self._body())
            if path == "/status":
                return HTTPStatus.OK, desk.status()
            if known[1]:
                return HTTPStatus.OK, desk.answer(int(known[1]))
            if desk.metrics is None:
                raise _Refused(HTTPStatus.NOT_FOUND, "this job has no metrics; install shardshift[metrics]")
            return HTTPStatus.OK, desk.metrics(desk.board.status())
        except (dist.DistError, OSError) as error:
            _log.warning("the job's store does not answer: %s", error)
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the job's store does not answer") from None
        except _Refused:
            raise
        except Exception:
            _log.exception("the control endpoint failed")
            raise _Refused(HTTPStatus.INTERNAL_SERVER_ERROR, "this failed; the launcher's log says how") from None

    def _body(self) -> bytes:
        length = self._length()
        if length is None:
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, "a body with a Content-Length is needed")
        if length > _MOST_BODY_BYTES:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has {_MOST_BODY_BYTES} bytes at most")
        body, self._left = self.rfile.read(length), 0
        if len(body) < length:
            raise _Refused(HTTPStatus.BAD_REQUEST, "the body ended early")
        return body

    _left: int | None = None

    def _length(self) -> int | None:
        """Bytes of body that are announced; None if that is not said in one plain number."""
        given = self.headers.get_all("Content-Length", [])
        if len(given) != 1 or not re.fullmatch(r"[0-9]{1,18}", given[0].strip(), re.ASCII):
            return None
        return None if "Transfer-Encoding" in self.headers else int(given[0])

    def _drain(self) -> None:
        """Take some of a body that nobody wants: closing with unread bytes resets the connection, answer and all."""
        left = self._left if self._left is not None else self._length()
        with contextlib.suppress(OSError):
            self.rfile.read(min(left or 0, _DRAINED_BYTES))

    def log_message(self, format: str, *args: Any) -> None:
        """Complaints of ``BaseHTTPRequestHandler`` hold what was sent: nothing of them is kept."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        status = code.value if isinstance(code, HTTPStatus) else code
        path = str(getattr(self, "path", "")).partition("?")[0]
        method = self.command if self.command in ("GET", "POST") else "?"
        _log.info("%s %s %s", method, path if _PATHS.fullmatch(path) else "?", status)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
