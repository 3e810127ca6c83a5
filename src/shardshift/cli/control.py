"""``shardshift resize`` and ``shardshift status``: ask a running job, over the endpoint of its launcher.

The job's file says where that is and holds the token, so the token is in no argument and no environment. Requests go
through ``http.client``: ``urllib`` would hand the token to whatever proxy the environment names, or a redirect.
"""

from __future__ import annotations

import http.client
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from rich import box
from rich.console import Console
from rich.table import Table

from ..elastic.operating.jobfile import Contact, find
from ..elastic.operating.request import Request
from ..report.console import print_whole
from ..values import Infeasible, ShardshiftError

_PATIENCE_S: Final = 15.0
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_MOST_BYTES: Final = 2**24
_SETTLED: Final = ("done", "refused")


def runtime_folder(given: Path | None) -> Path:
    """Where this user's jobs leave their files: as given, or $XDG_RUNTIME_DIR/shardshift, or /tmp/shardshift-UID."""
    if given is not None:
        return given
    own = os.environ.get("XDG_RUNTIME_DIR")
    return Path(own) / "shardshift" if own else Path(tempfile.gettempdir()) / f"shardshift-{os.geteuid()}"


def ask_resize(
    job: str, request: Request, folder: Path, *, wait: bool, timeout_s: float, as_json: bool = False
) -> None:
    """Post a request and, if asked, wait for what becomes of it; print both.

    Raises:
        Infeasible: if there is no such job, or it refused.
        ShardshiftError: if its endpoint does not answer, or the request is not settled in time.
    """
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    contact = find(folder, job)
    number = int(_call(contact, "POST", "/resize", request.to_json())["request"])
    answer: Mapping[str, Any] = {"state": "queued"}
    console.print(f"request {number} of job {job} is queued", markup=False)
    if wait:
        for answer in _answers(contact, number, timeout_s):
            if answer["state"] == "announced":
                console.print(f"announced: {answer['config']} after step {answer['iteration']}", markup=False)
    if as_json:
        print(json.dumps({"request": number, **answer}))
    if answer["state"] == "refused":
        raise Infeasible(f"request {number} is refused, the job trains on: {answer['reason']}")
    if answer["state"] == "done":
        console.print(f"done: {answer.get('reason') or answer.get('config')}", markup=False)


def print_status(job: str, folder: Path, *, as_json: bool = False) -> None:
    """Print how a job stands: a table, or its record as JSON on stdout.

    Raises:
        Infeasible: if there is no such job.
        ShardshiftError: if its endpoint does not answer, or the job does not train yet.
    """
    status = _call(find(folder, job), "GET", "/status")
    print_whole(Console(stderr=as_json, highlight=False), status_table(job, status))
    if as_json:
        print(json.dumps(status))


def status_table(job: str, status: Mapping[str, Any]) -> Table:
    """How a job stands, a line for each thing that its record says."""
    table = Table(box=box.SIMPLE_HEAD, title=f"Job {job}", title_justify="left", show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    last = status.get("last_change") or {}
    phases = last.get("phases_s") or {}
    tolerates = status.get("tolerates") or {}
    rows = {
        "layout": status.get("config"),
        "devices": _ids(status.get("devices")),
        "standby": _ids(status.get("standby")),
        "iteration": status.get("iteration"),
        "step": _ms(status.get("step_s")),
        "generation": status.get("generation"),
        "era": status.get("era"),
        "changes": _pairs(status.get("changes")),
        "last pause": f"{_ms(sum(phases.values()))} ({_pairs(phases, _ms)})" if phases else None,
        "last moved": f"{last['moved_bytes'] / 2**20:.1f} MiB" if "moved_bytes" in last else None,
        "tolerates": f"{_pairs(tolerates)} (losses)" if tolerates else None,
    }
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, str(value))
    return table


def _answers(contact: Contact, number: int, timeout_s: float) -> Iterator[Mapping[str, Any]]:
    """What becomes of a request, each time that it changes, until it is settled."""
    deadline_s, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    last: Mapping[str, Any] = {}
    while last.get("state") not in _SETTLED:
        answer = _call(contact, "GET", f"/requests/{number}")
        if answer != last:
            last = answer
            yield answer
            continue
        if time.monotonic() > deadline_s:
            raise ShardshiftError(
                f"request {number} of job {contact.job} is still {last['state']} after {timeout_s:g} s; it stays in "
                f"the queue. What to do: look at 'shardshift status {contact.job}', or wait longer (--timeout)"
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)


def _call(contact: Contact, method: str, path: str, body: object = None) -> dict[str, Any]:
    """One request to a job's endpoint, and the object that it answers."""
    address = urlsplit(contact.url)
    content = None if body is None else json.dumps(body)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_PATIENCE_S)
    try:
        connection.request(method, path, content, {"Authorization": f"Bearer {contact.token}"})
        response = connection.getresponse()
        status, answer = response.status, json.loads(response.read(_MOST_BYTES))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ShardshiftError(
            f"job {contact.job} does not answer at {contact.url} ({type(error).__name__}: {error}); what to do: see "
            f"whether its launcher, process {contact.pid}, still runs: the job may have ended meanwhile"
        ) from None
    finally:
        connection.close()
    if not isinstance(answer, dict):
        raise ShardshiftError(f"{contact.url} is no endpoint of shardshift; what to do: start the job again")
    if status >= HTTPStatus.BAD_REQUEST:
        refused = status in (HTTPStatus.BAD_REQUEST, HTTPStatus.TOO_MANY_REQUESTS)
        raise (Infeasible if refused else ShardshiftError)(f"job {contact.job}: {answer.get('error', status)}")
    return answer


def _ids(devices: Any) -> str | None:
    if not isinstance(devices, list):
        return None if devices is None else str(devices)
    return f"{len(devices)}: {', '.join(map(str, devices))}" if devices else "none"


def _pairs(values: Any, shown: Any = str) -> str | None:
    if not isinstance(values, Mapping):
        return None if values is None else str(values)
    return ", ".join(f"{name} {shown(value)}" for name, value in values.items()) or None


def _ms(seconds: Any) -> str | None:
    return None if seconds is None else f"{seconds * 1e3:.0f} ms"
