"""What every test stands on: repeatable Hypothesis runs, one thread a process, and no process left behind."""

import os
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

# A world of 8 processes on 2 cores is slower with more threads, and sums differ with their number. Set before torch is
# imported; the processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Megatron's routers compile functions with torch.compile, which takes 3 to 10 s in each process.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# Examples cross process start-ups and cold caches, so their time says nothing: no deadline.
settings.register_profile("dev", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

ENDING_S = 5.0
"""How long processes that a test started may take to end after it."""


STARTS_PROCESSES = {"cases", "demo", "docs", "elastic", "megatron", "transport"}
"""Folders whose tests start jobs: from one fork server a run, which is whatever the first job asks for."""

ONE_PROCESS = {
    *("alone", "bounds", "declared", "described", "flat", "fused", "layers_and_experts", "many_changes", "placements"),
    *("vocabulary", "board", "endpoint", "growth", "log", "metrics", "nearest", "policy", "proposal", "resize"),
    *("roster", "sources", "status", "undo", "groups", "connect", "nccl", "offers", "views"),
}
"""Files of these folders whose tests start none. All others are marked ``alone``: they have the cores to themselves."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in STARTS_PROCESSES and item.path.stem.removeprefix("test_") not in ONE_PROCESS:
            item.add_marker("alone")
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch  # here: a run without such tests need not pay for it

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


PRELOAD = ["shardshift.demo.worker", "tests.cases.movers", "tests.elastic.toy", "tests.megatron.losing"]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the fork server import once what each of some thousand processes would import for itself."""
    if session.config.option.collectonly:
        return
    if any(item.get_closest_marker("alone") for item in session.items):
        from shardshift.elastic import start_fork_server  # here: a run without such tests need not pay for it

        start_fork_server(PRELOAD)


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """End what the test left running, and fail the test for it.

    A forgotten rank waits in a collective on one of two cores and slows or stops all later tests. Processes of fixtures
    with a wider scope were there before the test and are left alone.
    """
    before = set(_descendants())
    yield
    left = [process for process in _descendants() if process not in before]
    if not left:
        return
    _, left = psutil.wait_procs(left, timeout=ENDING_S)
    names = [_describe(process) for process in left]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=ENDING_S)
    if names:
        pytest.fail(f"the test left {len(names)} process(es) running: " + "; ".join(names), pytrace=False)


def _descendants() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if _counts(process)]


def _counts(process: psutil.Process) -> bool:
    """Whether a test has to end it: no zombie, none of the helpers that multiprocessing keeps until Python ends."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
    return "multiprocessing.resource_tracker" not in command and "multiprocessing.forkserver" not in command


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (ended since)"
