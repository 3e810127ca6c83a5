"""The beginning of two long walks over every configuration of eight devices: each change exact, losses close.

``python -m tests.megatron.walking --walk`` goes all of both, two hundred changes, in some ten minutes.
"""

import pytest
from tests.megatron.walking import Walk, bounds, configurations, follow

CHANGES = 10


@pytest.mark.timeout(300)
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_long_walk_is_exact_after_each_change_and_its_losses_stay_within_the_bound(experts: bool) -> None:
    walk = Walk.random(100, seed=20 + experts, experts=experts).first(CHANGES)
    losses, exact = follow(walk)
    assert exact == CHANGES
    bound = bounds()["experts" if experts else "dense"]
    assert losses.keys() == {*range(1, walk.steps + 1)}
    for step, loss in losses.items():
        assert abs(loss - bound["losses"][step - 1]) <= bound["most"]


def test_the_walk_has_many_places_to_go() -> None:
    assert len(configurations(experts=False)) > 50
    assert len(configurations(experts=True)) > 100
