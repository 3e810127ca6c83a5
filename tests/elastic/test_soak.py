"""Many changes and losses in a row leave nothing behind; ``soaking`` goes a hundred."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.elastic.soaking import Soak, soak


@pytest.mark.timeout(110)
def test_changes_and_losses_in_a_row_leave_nothing_open() -> None:
    how = Soak(changes=21, devices=4, kill_every=7, forked=True)
    found = soak(how)
    assert found.generation >= how.changes
    assert len(found.killed) == 3
    compared = 0
    for counts in found.counts.values():
        whole = [one for one in counts if one.config == str(how.whole)]
        for before, after in pairwise(whole[1:]):  # the first worlds are made before other things are
            compared += 1
            assert (after.fds, after.threads, after.groups) == (before.fds, before.threads, before.groups)
    assert compared
