from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from shardshift.coordination import Control, opened, record_failure, refusal, settle, to_record
from shardshift.values import Infeasible, Mismatch, PeerLost, ShardshiftError


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("this cannot be pickled")


def outcomes(answers: dict[int, bytes], store: dist.Store | None = None) -> list[Any]:
    """What each member gets: the records, or the error that it raised."""
    store = store or dist.HashStore()

    def ask(device: int) -> Any:
        try:
            return settle(Control(store, device, 20.0), "topic", tuple(answers), "agree", answers[device])
        except ShardshiftError as error:
            return error

    with ThreadPoolExecutor(len(answers)) as pool:
        return list(pool.map(ask, answers))


def test_all_hear_what_all_say() -> None:
    answers = {device: to_record(number=device) for device in (3, 0, 7)}
    assert outcomes(answers) == [{0: {"number": 0}, 3: {"number": 3}, 7: {"number": 7}}] * 3


def test_one_that_refuses_is_heard_by_all_and_the_lowest_counts() -> None:
    answers = {0: to_record(), 1: refusal(Infeasible("of 1")), 2: refusal(Mismatch("of 2"))}
    for error in outcomes(answers):
        assert isinstance(error, Infeasible)
        assert str(error) == "of 1"


def test_an_exception_that_cannot_be_pickled_arrives_as_text() -> None:
    for error in outcomes({0: to_record(), 1: refusal(Unpicklable("deep trouble"))}):
        assert type(error) is ShardshiftError
        assert str(error) == "Unpicklable: deep trouble"


def test_a_member_that_dies_after_the_last_answer_parts_nobody() -> None:
    store, answers = dist.HashStore(), {device: to_record() for device in range(3)}
    for device, answer in answers.items():
        Control(store, device, 1.0).publish(f"topic/{device}", answer)
    record_failure(store, [2], "agree", "it died right after it had answered")
    assert outcomes(answers, store) == [{0: {}, 1: {}, 2: {}}] * 3


def test_a_member_that_dies_before_the_last_answer_is_lost_to_all() -> None:
    store = dist.HashStore()
    record_failure(store, [2], "agree", "it died")
    found = outcomes({0: to_record(), 1: to_record()}, store)
    # Whoever of the two comes last may find both answers; the verdict of the first holds for it as well.
    assert {type(one) for one in found} in ({PeerLost}, {dict})


def test_who_answers_after_the_others_gave_up_learns_that_they_did() -> None:
    store = dist.HashStore()
    with pytest.raises(PeerLost, match="did not come"):
        settle(Control(store, 0, 0.2), "topic", (0, 1), "commit", to_record())
    with pytest.raises(PeerLost, match="did not come") as caught:
        settle(Control(store, 1, 5.0), "topic", (0, 1), "commit", to_record())
    assert caught.value.ranks == (1,)


class Slow(Control):
    """Reads the failure before the others' last answer, as a member whose timer ran out does."""

    answer_comes: Callable[[], None]

    def gather(self, topic: str, members: Any, content: bytes, phase: str) -> dict[int, bytes]:
        self.publish(f"{topic}/{self.device}", content)
        self.answer_comes()
        raise record_failure(self.store, [1], phase, "too slow")


def test_who_gives_up_follows_a_decision_that_was_made_without_it() -> None:
    store = dist.HashStore()
    slow = Slow(store, 0, 1.0)
    found: list[Any] = []

    def other() -> None:
        found.append(settle(Control(store, 1, 20.0), "topic", (0, 1), "commit", to_record()))

    def comes() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    slow.answer_comes = comes
    assert settle(slow, "topic", (0, 1), "commit", to_record()) == found[0] == {0: {}, 1: {}}


def test_a_record_opens_or_raises_what_it_carries() -> None:
    assert opened(to_record(a=1)) == {"a": 1}
    with pytest.raises(Mismatch, match="text"):
        opened(refusal(Mismatch("text")))
