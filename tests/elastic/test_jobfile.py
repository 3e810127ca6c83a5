from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardshift.elastic.operating.jobfile import JobFile, find, jobs
from shardshift.values import Infeasible, Mismatch

URL = "http://127.0.0.1:4711"


Ask = Callable[[Path, str], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "shardshift"


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_job_is_found_by_its_name_while_it_runs(folder: Path) -> None:
    with JobFile.claim(folder, "night-7b.1") as file:
        file.publish(URL)
        found = find(folder, "night-7b.1")
        assert (found.job, found.url, found.token, found.pid) == ("night-7b.1", URL, file.token, os.getpid())
        assert jobs(folder) == ["night-7b.1"]
    assert jobs(folder) == []
    with pytest.raises(Infeasible, match=r"no job named 'night-7b\.1' runs here .*: none\. What to do"):
        find(folder, "night-7b.1")


def test_whatever_the_umask_nobody_else_can_read_them(folder: Path, open_umask: None) -> None:
    with JobFile.claim(folder, "job") as file:
        file.publish(URL)
        assert mode(folder) == 0o700
        assert {path.name: mode(path) for path in folder.iterdir()} == {"job.json": 0o600, "job.lock": 0o600}


def test_a_token_is_long_new_and_in_no_text(folder: Path) -> None:
    with JobFile.claim(folder, "a") as one, JobFile.claim(folder, "b") as other:
        one.publish(URL)
        assert len(one.token) >= 43
        assert one.token != other.token
        assert one.token not in repr(one) + repr(find(folder, "a")) + str(find(folder, "a"))


def test_two_jobs_of_one_name_are_refused(folder: Path) -> None:
    with JobFile.claim(folder, "job") as file:
        file.publish(URL)
        with pytest.raises(Infeasible, match="a job named 'job' runs already"):
            JobFile.claim(folder, "job")
        assert find(folder, "job").token == file.token
    with JobFile.claim(folder, "job") as again:
        again.publish(URL)
        assert find(folder, "job").token == again.token


def test_the_file_of_a_launcher_that_was_killed_is_stale_and_its_name_is_free(folder: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from shardshift.elastic.operating.jobfile import JobFile\n"
        "file = JobFile.claim(Path(sys.argv[1]), 'job'); file.publish('http://127.0.0.1:1')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(folder)], timeout=60, check=False)
    assert killed.returncode == -9
    assert (folder / "job.json").exists()
    assert jobs(folder) == []
    with pytest.raises(Infeasible, match=r"'job' has ended without a word \(its launcher was process \d+\)"):
        find(folder, "job")
    with JobFile.claim(folder, "job"), pytest.raises(Infeasible, match="'job' is starting"):
        find(folder, "job")


def test_a_process_that_the_launcher_starts_does_not_hold_the_name(folder: Path) -> None:
    with JobFile.claim(folder, "job") as file:
        file.publish(URL)
        worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    assert jobs(folder) == []
    JobFile.claim(folder, "job").close()
    worker.communicate(b"\n", timeout=30)


def test_those_who_look_never_see_half_a_file_nor_keep_a_job_from_starting(folder: Path) -> None:
    ended = threading.Event()
    seen: list[str] = []

    def look() -> None:
        while not ended.is_set():
            try:
                seen.append(find(folder, "job").url)
            except Infeasible:
                continue  # it is not there, is starting, or has just ended
            except BaseException as error:
                seen.append(repr(error))
                raise

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(50):
            with JobFile.claim(folder, "job") as file:
                file.publish(URL)
                file.publish(URL)
    finally:
        ended.set()
        thread.join()
    assert {*seen} <= {URL}


@pytest.mark.parametrize("name", ["", ".", "..", "../job", "a/b", "-rf", ".hidden", "a\nb", "a" * 101, "jöb", "a\0"])
def test_a_name_that_could_be_a_path_or_an_option_is_refused(folder: Path, name: str) -> None:
    for ask in (JobFile.claim, find):
        with pytest.raises(Infeasible, match="cannot name a job; what to do"):
            ask(folder, name)


@pytest.mark.parametrize("ask", [JobFile.claim, find])
class TestAFolderThatIsNotThisUsersAlone:
    def test_a_link_is_not_followed(self, folder: Path, tmp_path: Path, ask: Ask) -> None:
        (tmp_path / "own").mkdir(0o700)
        folder.parent.mkdir()
        folder.symlink_to(tmp_path / "own")
        with pytest.raises(Infeasible, match="it is a link or no folder"):
            ask(folder, "job")
        assert [*(tmp_path / "own").iterdir()] == []

    @pytest.mark.parametrize("rights", [0o755, 0o770, 0o707, 0o701])
    def test_rights_of_others_are_refused(self, folder: Path, ask: Ask, rights: int) -> None:
        folder.mkdir(parents=True)
        folder.chmod(rights)
        with pytest.raises(Infeasible, match=rf"others have rights in it \(mode 0{rights:o}, expected 0700\)"):
            ask(folder, "job")

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
    @pytest.mark.parametrize("link", [False, True])
    def test_somebody_elses_is_refused(self, folder: Path, tmp_path: Path, ask: Ask, link: bool) -> None:
        theirs = tmp_path / "theirs"
        theirs.mkdir(0o700)
        os.chown(theirs, 12345, 12345)
        folder.parent.mkdir()
        if link:
            folder.symlink_to(theirs)
            os.chown(folder, 12345, 12345, follow_symlinks=False)
        else:
            theirs.rename(folder)
        with pytest.raises(Infeasible, match="it is a link" if link else "it belongs to user 12345, not 0"):
            ask(folder, "job")

    def test_a_file_in_its_place_is_refused(self, folder: Path, ask: Ask) -> None:
        folder.parent.mkdir()
        folder.touch()
        with pytest.raises(Infeasible, match="it is a link or no folder"):
            ask(folder, "job")


def test_a_job_file_that_is_a_link_or_readable_is_not_trusted(folder: Path, tmp_path: Path) -> None:
    with JobFile.claim(folder, "job") as file:
        file.publish(URL)
        os.chmod(folder / "job.json", 0o644)
        with pytest.raises(Mismatch, match="not a plain file of this user alone"):
            find(folder, "job")
        (folder / "job.json").rename(tmp_path / "elsewhere")
        (folder / "job.json").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(Mismatch, match="cannot be read"):
            find(folder, "job")


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"url": URL}), json.dumps({"pid": "x"})])
def test_a_job_file_of_another_kind_is_said(folder: Path, content: str) -> None:
    with JobFile.claim(folder, "job") as file:
        file.publish(URL)
        (folder / "job.json").write_text(content)
        with pytest.raises(Mismatch, match="holds something else"):
            find(folder, "job")


def test_a_lock_that_is_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    JobFile.claim(folder, "other").close()
    (folder / "job.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match=r"job\.lock"):
        JobFile.claim(folder, "job")
    assert not (tmp_path / "victim").exists()


def test_nothing_stays_open(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with JobFile.claim(folder, "job") as file:
            file.publish(URL)
            find(folder, "job")
            with pytest.raises(Infeasible):
                JobFile.claim(folder, "job")
        with pytest.raises(Infeasible):
            find(folder, "job")
    assert len(os.listdir("/proc/self/fd")) == before
