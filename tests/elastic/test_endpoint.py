"""The control endpoint as whoever is allowed to uses it, and as whoever is not tries to."""

from __future__ import annotations

import contextlib
import hmac
import http.client
import itertools
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardshift.elastic.operating import endpoint as module
from shardshift.elastic.operating.answer import Answer
from shardshift.elastic.operating.board import STATUS_KEY, Board
from shardshift.elastic.operating.endpoint import Endpoint
from shardshift.elastic.operating.metrics import Metrics
from shardshift.elastic.operating.request import Request
from shardshift.values import Infeasible, ParallelConfig

TOKEN = "kYq0c8J1mS5z7Wv2Xb4N9aRtEuPiLoGh"
STATUS = {"iteration": 12, "config": "pp4tp2dp1", "devices": [0, 1, 2, 3, 4, 5, 6, 7], "generation": 2}


@dataclass
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Ask = Callable[..., Reply]


@pytest.fixture(autouse=True)
def quick_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.005)


@pytest.fixture
def board() -> Board:
    return Board(dist.HashStore())


@pytest.fixture
def served(board: Board) -> Iterator[Endpoint]:
    with Endpoint(board, TOKEN, Metrics("job").text) as endpoint:
        yield endpoint


@pytest.fixture
def ask(served: Endpoint) -> Ask:
    def ask(method: str, path: str, body: Any = None, token: str | None = TOKEN, **headers: str) -> Reply:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"
        connection = connect(served)
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, content, sent)
            reply = connection.getresponse()
            return Reply(reply.status, reply.headers, reply.read())
        finally:
            connection.close()

    return ask


def connect(served: Endpoint) -> http.client.HTTPConnection:
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    return http.client.HTTPConnection(host, int(port), timeout=20)


def raw(served: Endpoint, *sent: bytes) -> bytes:
    """What comes back for bytes that no client would send, until the connection is closed."""
    got = b""
    with connect_socket(served) as sock:
        for part in sent:
            sock.sendall(part)
        while part := sock.recv(65536):
            got += part
    return got


def connect_socket(served: Endpoint) -> socket.socket:
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


# Those who may


def test_the_status_is_what_the_lead_wrote(ask: Ask, board: Board) -> None:
    early = ask("GET", "/status")
    assert (early.status, early.json) == (503, {"error": "it does not train yet; what to do: ask again later"})
    board._store.set(STATUS_KEY, json.dumps(STATUS))
    now = ask("GET", "/status?pretty")
    assert (now.status, now.json) == (200, STATUS)
    assert now.headers["Content-Type"] == "application/json"
    assert now.headers["Cache-Control"] == "no-store"


def test_a_request_is_posted_and_answered(ask: Ask, board: Board) -> None:
    posted = ask("POST", "/resize", {"to": "pp4tp2dp1"})
    assert (posted.status, posted.json) == (202, {"request": 1})
    assert board.request(1) == Request(to=ParallelConfig(pp=4, tp=2))
    queued = {"state": "queued", "reason": "", "iteration": None, "config": ""}
    assert ask("GET", "/requests/1").json == queued
    board.write(1, Answer("refused", "too few", 7, "pp4tp2dp1", None, (0, 1)))
    refused = {"state": "refused", "reason": "too few", "iteration": 7, "config": "pp4tp2dp1"}
    assert ask("GET", "/requests/1").json == refused
    assert ask("GET", "/requests/2").status == 404
    assert ask("POST", "/resize", {"devices": 6}).json == {"request": 2}
    assert ask("POST", "/resize", {"leave": [4, 5], "within_s": 25.0}).json == {"request": 3}


def test_two_requests_at_once_are_two_numbers(ask: Ask, board: Board) -> None:
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda devices: ask("POST", "/resize", {"devices": devices}), range(1, 13)))
    assert sorted(reply.json["request"] for reply in replies) == list(range(1, 13))
    assert sorted(board.request(number).devices or 0 for number in range(1, 13)) == list(range(1, 13))


def test_a_queue_that_is_full_is_said(ask: Ask, board: Board) -> None:
    for _ in range(32):
        board.post(Request(devices=1))
    full = ask("POST", "/resize", {"devices": 6})
    assert full.status == 429
    assert "32 requests wait" in full.json["error"]
    assert ask("POST", "/resize", {"leave": [4]}).status == 202


def test_metrics_are_in_prometheus_text_format(ask: Ask, board: Board) -> None:
    board._store.set(STATUS_KEY, json.dumps(STATUS))
    reply = ask("GET", "/metrics")
    assert reply.status == 200
    assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b"\nshardshift_devices 8.0\n" in reply.body


def test_without_metrics_there_are_none(board: Board) -> None:
    with Endpoint(board, TOKEN) as served:
        got = raw(served, f"GET /metrics HTTP/1.0\r\nAuthorization: bearer {TOKEN}\r\n\r\n".encode())
    assert got.startswith(b"HTTP/1.0 404 ")
    assert b"shardshift[metrics]" in got


def test_another_board_is_served_when_the_store_has_moved(ask: Ask, served: Endpoint) -> None:
    ask("POST", "/resize", {"devices": 6})
    served.use(Board(dist.HashStore()))
    assert ask("GET", "/requests/1").status == 404
    assert ask("GET", "/requests/1", token="wrong").status == 401


# Those who may not


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        TOKEN,
        f"Basic {TOKEN}",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN.lower()}",
        "Bearer \xe4\xff",
        f"Bearer x, Bearer {TOKEN}",
    ],
)
def test_without_the_token_there_is_nothing_but_401(ask: Ask, board: Board, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    paths = ["/status", "/requests/1", "/metrics", "/resize", "/", "/../etc/passwd", "*"]
    for method, path in itertools.product(("GET", "POST"), paths):
        reply = ask(method, path, {"devices": 6} if method == "POST" else None, None, **headers)
        assert reply.status == 401
        assert reply.headers["WWW-Authenticate"] == 'Bearer realm="shardshift"'
        assert reply.json == {"error": "a token is needed: Authorization: Bearer TOKEN"}
        assert TOKEN.encode() not in reply.body
    assert board.count() == 0


def test_a_token_in_the_address_counts_for_nothing(ask: Ask) -> None:
    assert ask("GET", f"/status?token={TOKEN}&access_token={TOKEN}", token=None).status == 401


def test_tokens_are_compared_in_constant_time(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, right: bytes) -> bool:
        compared.append((given, right))
        return given == right

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert ask("GET", "/requests/9").status == 404
    assert compared == [(TOKEN.encode(), TOKEN.encode())]


def test_the_token_is_in_no_log_no_argument_and_no_environment(
    ask: Ask, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], board: Board
) -> None:
    caplog.set_level(logging.DEBUG)
    board._store.set(STATUS_KEY, json.dumps(STATUS))
    ask("GET", f"/status?token={TOKEN}")
    ask("GET", f"/{TOKEN}")
    ask("POST", "/resize", {"to": TOKEN})
    ask("POST", "/resize", b'{"to": "' + TOKEN.encode())
    ask(f"X{TOKEN}", "/status")
    said = "\n".join(record.getMessage() for record in caplog.records) + "".join(capfd.readouterr())
    assert "GET /status 200" in said
    assert "POST /resize 400" in said
    assert TOKEN not in said
    for task in Path("/proc/self/task").iterdir():
        for name in ("cmdline", "environ", "comm"):
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread whose request has ended
                assert TOKEN.encode() not in (task / name).read_bytes()
    assert all(TOKEN not in thread.name for thread in threading.enumerate())


# What is malformed


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
        (b"[" * 60000, "no JSON"),
        (b'{"devices": ' + b"9" * 6000 + b"}", "no JSON"),
        (b"[]", "a JSON object"),
        (b"null", "a JSON object"),
        (b"{}", "a layout, a number of devices, or devices that leave"),
        (b'{"to": "rm -rf"}', "not a parallel configuration"),
        (b'{"to": "pp2", "devices": 2}', "one of the three"),
        (b'{"to": "pp2", "__class__": 2}', "has no '__class__'"),
        (b'{"leave": [1], "within_s": 1e999}', "within_s"),
    ],
)
def test_a_body_that_is_no_request_is_400_and_nothing_is_posted(
    ask: Ask, board: Board, body: bytes, complaint: str
) -> None:
    reply = ask("POST", "/resize", body)
    assert reply.status == 400
    assert complaint in reply.json["error"]
    assert len(reply.body) < 2000
    assert board.count() == 0


def test_a_huge_body_is_refused_without_being_kept(ask: Ask, served: Endpoint) -> None:
    reply = ask("POST", "/resize", b" " * 2**20)
    assert reply.status == 413
    head = f"POST /resize HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {2**50}\r\n\r\n"
    with connect_socket(served) as sock:
        sock.sendall(head.encode())
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(100).startswith(b"HTTP/1.0 413 ")


@pytest.mark.parametrize(
    ("length", "status"),
    [
        ("Content-Length: -1", 411),
        ("Content-Length: 1e3", 411),
        ("Content-Length: 3\r\nContent-Length: 4", 411),
        ("Transfer-Encoding: chunked", 411),
        ("Transfer-Encoding: chunked\r\nContent-Length: 3", 411),
        ("X: y", 411),
        ("Content-Length: 99", 400),
    ],
)
def test_a_body_whose_length_is_not_plain_is_refused(served: Endpoint, length: str, status: int) -> None:
    head = f"POST /resize HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n{length}\r\n\r\n"
    with connect_socket(served) as sock:
        sock.sendall(head.encode() + b"{}\n")
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(12) == f"HTTP/1.0 {status}".encode()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/status/", 404),
        ("GET", "/requests/", 404),
        ("GET", "/requests/-1", 404),
        ("GET", "/requests/1e3", 404),
        ("GET", "/requests/0", 404),
        ("GET", "/requests/9999999999", 404),
        ("GET", "/requests/%d9%a3", 404),
        ("GET", "/request/1/answer", 404),
        ("GET", "/resize", 405),
        ("DELETE", "/requests/1", 405),
        ("PUT", "/resize", 405),
        ("HEAD", "/resize", 405),
        ("POST", "/status", 405),
        ("BREW", "/status", 501),
    ],
)
def test_unknown_paths_and_methods_have_their_status(ask: Ask, method: str, path: str, status: int) -> None:
    assert ask(method, path).status == status


@pytest.mark.parametrize(
    "sent", [b"\r\n\r\n", b"nonsense\r\n\r\n", b"GET\r\n\r\n", b"GET " + b"/" * 70000 + b" HTTP/1.0\r\n\r\n", b"\0\xff"]
)
def test_what_is_no_http_does_no_harm(served: Endpoint, ask: Ask, sent: bytes) -> None:
    with connect_socket(served) as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
    assert ask("GET", "/requests/1").status == 404


def test_a_store_that_does_not_answer_is_503_and_a_mistake_of_ours_500(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def check(self, keys: list[str]) -> bool:
            raise self.error

    for error, status in ((dist.DistStoreError("secret address"), 503), (ZeroDivisionError("secret detail"), 500)):
        with Endpoint(Board(Failing(error)), TOKEN) as served:  # type: ignore[arg-type]
            got = raw(served, f"GET /status HTTP/1.0\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        assert got.startswith(f"HTTP/1.0 {status} ".encode())
        assert b"secret" not in got
    assert "secret detail" in caplog.text


# Those who hold on


def test_silent_connections_are_cut_and_do_not_keep_others_out_for_good(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_CONNECTIONS", 3)
    monkeypatch.setattr(module, "_LONGEST_S", 0.0)
    with Endpoint(board, TOKEN) as served:
        silent = [connect_socket(served) for _ in range(5)]
        for sock in silent:
            assert sock.recv(1) == b""  # cut: at once those above three, the others once their time is over
            sock.close()


def test_an_endpoint_closes_though_connections_are_open(board: Board) -> None:
    threads = threading.active_count()
    endpoint = Endpoint(board, TOKEN)
    with connect_socket(endpoint) as sock:
        sock.sendall(b"GET /status HTTP/1.0\r\nX: ")
        endpoint.close()
        with contextlib.suppress(ConnectionResetError):  # where it was not accepted yet
            assert sock.recv(100) == b""
    with pytest.raises(ConnectionRefusedError):
        connect_socket(endpoint)
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join(10)
    assert threading.active_count() == threads


def test_nothing_stays_open(board: Board) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Endpoint(board, TOKEN) as served, connect_socket(served) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            while sock.recv(4096):
                pass
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join(10)
    assert len(os.listdir("/proc/self/fd")) == before


# Where it listens


def test_it_listens_on_loopback_alone_unless_asked(served: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    assert served.url.startswith("http://127.0.0.1:")
    assert served._server.socket.getsockname()[0] == "127.0.0.1"
    assert caplog.text == ""


def test_another_address_is_listened_on_with_a_warning(board: Board, caplog: pytest.LogCaptureFixture) -> None:
    with Endpoint(board, TOKEN, host="0.0.0.0") as served:
        assert served.url.startswith("http://0.0.0.0:")
    assert "its token passes in the clear" in caplog.text
    assert TOKEN not in caplog.text


def test_a_port_that_is_taken_and_a_token_that_is_short_are_refused(board: Board, served: Endpoint) -> None:
    port = int(served.url.rpartition(":")[2])
    with pytest.raises(Infeasible, match=f"cannot listen on 127.0.0.1 port {port}: .*; what to do"):
        Endpoint(board, TOKEN, port=port)
    with pytest.raises(Infeasible, match="can be guessed"):
        Endpoint(board, "secret")
