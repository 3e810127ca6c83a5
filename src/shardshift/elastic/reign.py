"""Where the job's store is, as the agent of a node tells its workers: in a file that it writes anew for each reign.

A *reign* is the time of one store. Workers look into the file when the store does not answer them any more.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch.distributed as dist

from ..values import ShardshiftError

STORE_FILE: Final = "SHARDSHIFT_STORE_FILE"
"""The variable that tells workers its path."""
_LOOK_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where the store is.

    Attributes:
        reign: the number of its reign.
        host: address of its host.
        port: of the store.
        patience_s: so long the next one may take to be found; after it there is none.
    """

    reign: int
    host: str
    port: int
    patience_s: float

    def write(self, path: Path) -> None:
        """Tell the workers; whole or not at all."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> Whereabouts:
        """What the agent has written last."""
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True, slots=True)
class Following:
    """How a worker finds the store that takes the place of one that is lost.

    Attributes:
        path: of the agent's file.
        timeout_s: how long a request to a store may take.
    """

    path: Path
    timeout_s: float

    @classmethod
    def from_launcher(cls, timeout_s: float) -> Following | None:
        """From what ``shardshift run`` sets; None under other launchers."""
        path = os.environ.get(STORE_FILE)
        return None if path is None else cls(Path(path), timeout_s)

    def present(self) -> tuple[int, dist.Store]:
        """The store that there is, and the number of its reign; a later one, if its host is lost meanwhile.

        Raises:
            ShardshiftError: if there is none in time.
        """
        found = Whereabouts.read(self.path)
        try:
            return found.reign, self._connected(found)
        except dist.DistError:
            return self(found.reign)

    def is_over(self, reign: int) -> bool:
        """Whether a reign is over by what the agent says, also if its store answers still."""
        return Whereabouts.read(self.path).reign > reign

    def __call__(self, reign: int) -> tuple[int, dist.Store]:
        """The store that follows that of a reign, and the number of its reign.

        Raises:
            ShardshiftError: if there is none in time.
        """
        seen, until_s = reign, time.monotonic() + Whereabouts.read(self.path).patience_s
        while True:
            found = Whereabouts.read(self.path)
            if found.reign > seen:
                seen, until_s = found.reign, time.monotonic() + found.patience_s
            if found.reign > reign:
                with suppress(dist.DistError):  # its host may be lost, too: then there will be yet another one
                    return found.reign, self._connected(found)
            if time.monotonic() > until_s:
                raise ShardshiftError(
                    "the job's store does not answer, and this node's agent has found no other; what to do: see what "
                    "it says, and start the job again from its last checkpoint"
                )
            time.sleep(_LOOK_S)

    def _connected(self, to: Whereabouts) -> dist.TCPStore:
        timeout = timedelta(seconds=self.timeout_s)
        return dist.TCPStore(to.host, to.port, is_master=False, wait_for_workers=False, timeout=timeout)
