from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardshift.transport import KINDS, ProcessGroupTransport, SameHostTransport, connect
from shardshift.values import Infeasible


def test_a_device_alone_gets_gloo_of_any_kind_for_tensors_in_host_memory() -> None:
    for kind in ("auto", "gloo", "same-host"):
        transport = connect(dist.HashStore(), 7, [7], 5.0, kind=kind)
        assert isinstance(transport, ProcessGroupTransport)
        assert transport.device == 7
        transport.close()


def test_a_kind_that_is_not_there_is_refused() -> None:
    with pytest.raises(Infeasible, match=f"no transport 'rdma'; what to do: use one of {', '.join(KINDS)}"):
        connect(dist.HashStore(), 0, 1, 5.0, kind="rdma")


def test_without_the_direct_path_gloo_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[bool]()

    class Gloo:
        def close(self) -> None:
            closed.append(True)

    def fail(*_: Any) -> None:
        raise RuntimeError("no store")

    monkeypatch.setattr(ProcessGroupTransport, "gloo", lambda *_, **__: Gloo())
    monkeypatch.setattr(SameHostTransport, "over", fail)
    with pytest.raises(RuntimeError, match="no store"):
        connect(dist.HashStore(), 0, 2, 5.0)
    assert closed == [True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_is_refused() -> None:
    with pytest.raises(Infeasible, match="NCCL needs a GPU"):
        connect(dist.HashStore(), 0, 1, 5.0, kind="nccl")
