"""What every test stands on: repeatable Hypothesis runs, one thread a process, and no process left behind."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

# A world of 8 processes on 2 cores is slower with more threads, and sums differ with their number. Set before torch is
# imported; the processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# c10d asks a name server for the name of each process that connects to a store, and where the answer gets lost it asks
# again after 5 s, which is more than many a test lets a peer take.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
# Megatron's routers compile functions with torch.compile, which takes 3 to 10 s in each process.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# Examples cross process start-ups and cold caches, so their time says nothing: no deadline.
settings.register_profile("dev", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

ENDING_S = 5.0
"""How long processes that a test started may take to end after it."""


STARTS_PROCESSES = {"cases", "demo", "docs", "dtensor", "elastic", "megatron", "transport"}
"""Folders whose tests start jobs: from one fork server a run, which is whatever the first job asks for."""

ONE_PROCESS = {
    *("alone", "bounds", "declared", "described", "flat", "fused", "layers_and_experts", "many_changes", "placements"),
    *("vocabulary", "board", "endpoint", "growth", "jobfile", "log", "member", "metrics", "nearest", "policy"),
    *("proposal", "resize", "roster", "sources", "status", "undo", "early", "groups", "connect", "memory", "nccl"),
    *("offers", "views"),
    *("cuts", "described_jobs", "described_names", "dry_run", "elements", "job_audit", "job_companions", "job_state"),
    *("live", "mesh", "mesh_pairs", "parts", "retire", "spread"),
}
"""Files of these folders whose tests start none: they run beside any other of the kind."""

PATIENT = {
    *("companions", "failures", "jobs", "peaks", "restart", "wires", "demo"),
    *("commands", "elastic_guide", "example", "features", "fsdp_example", "manifests", "megatron_example"),
    *("titan_example",),
    *("agent", "buddy", "joining", "launchers", "leaving", "recovery", "session", "soak", "store_lost", "succession"),
    *("ahead", "architectures", "attack", "audit", "beginning", "carry", "cases_modules", "cases_names"),
    *("cases_numbers", "cases_optimizers", "distributed_optimizer", "exact", "experts", "grid", "half", "load"),
    *("odd_jobs", "oracle", "peer", "quiesce", "recover", "refusals", "script", "stages", "streams", "survival"),
    *("versions", "walk", "world", "process_group", "same_host", "mesh_end"),
}
"""Files of these folders whose jobs are slower at worst when another file's run beside them: their limits are of 10 s
and more, and no test waits for one to pass. They are marked ``patient``; but for single tests that wait for a limit to
pass, which are marked ``alone`` where they stand. All other files are marked ``alone``, too. Those tests run beside one
another at most: their limits are short, and they mostly wait."""


LONG = {
    *("commands", "demo", "elastic_guide", "features", "fsdp_example", "joining", "launchers", "megatron_example"),
    *("recover", "restart", "script", "succession", "titan_example", "versions", "walk"),
}
"""Files of few tests that take 10 s each and more. They are begun first, and then those with most tests, so that at the
end no worker waits for one of them."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    _mark(items)
    yield  # those of other parts are left out
    tests = Counter(item.path for item in items)
    long = {path: path.stem.removeprefix("test_") in LONG for path in tests}
    items.sort(key=lambda item: (not long[item.path], -tests[item.path]))


def _mark(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.path.stem.removeprefix("test_")
        marked = any(item.get_closest_marker(mark) for mark in ("alone", "patient"))
        if item.path.parent.name in STARTS_PROCESSES and name not in ONE_PROCESS and not marked:
            item.add_marker("patient" if name in PATIENT else "alone")
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch  # here: a run without such tests need not pay for it

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


# pytest, too: a worker that stands in a test file imports that file, and importing pytest takes three times as long as
# all the rest of a process's life.
PRELOAD = [
    *("pytest", "shardshift.demo.worker", "shardshift.elastic.agent.agent"),
    *("tests.cases.movers", "tests.dtensor.models", "tests.elastic.toy", "tests.megatron.losing"),
    *("tests.transport.processes", "torch.distributed.checkpoint"),
]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the fork server import once what each of some thousand processes would import for itself."""
    if session.config.option.collectonly:
        return
    if any(item.get_closest_marker(mark) for item in session.items for mark in ("alone", "patient")):
        from shardshift.elastic import start_fork_server  # here: a run without such tests need not pay for it

        start_fork_server(PRELOAD)


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[None]:
    """The folder of benchmarks on the path, as ``shardshift bench`` has it."""
    folder = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


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
