"""A long walk from configuration to configuration, and how far losses may stray on it.

The bound on losses is measured before any walk, on jobs that never change: ``python -m tests.megatron.walking`` trains
the same model in fixed layouts and writes how far their losses lie apart to ``walk_bounds.json``. Layouts add floating
point numbers in different orders; a walk through many of them may stray as far as two of them do. With
``--walk`` it goes the two walks whole, a hundred changes each.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from tests.megatron.harness import TIMEOUT_S, Scenario, Send, initialise, open_session, run_processes
from tests.megatron.training import Training, optimizer_step, train_step, training

from shardshift import ParallelConfig, Resize, Session, ShardshiftError
from shardshift.adapters.megatron import Job
from shardshift.demo import oracle
from shardshift.elastic import LocalJob

DEVICES: Final = 8
LAYERS: Final = 12
HEADS: Final = 24
EXPERTS: Final = 8
BATCH: Final = 24
STEP_EVERY: Final = 10
"""Changes between two steps of training."""
STEPS: Final = 12
"""Steps of training that there are losses of."""
BOUNDS: Final = Path(__file__).with_name("walk_bounds.json")
FIXED: Final = ("pp1tp1dp1", "pp2tp2dp2", "pp1tp4dp2", "pp4tp1dp1vpp3")
FIXED_EXPERTS: Final = ("pp1tp1dp1", "pp1tp2dp2ep2", "pp2tp1dp4ep4", "pp1tp2dp4ep4etp1")


def configurations(*, experts: bool) -> list[str]:
    """Every configuration of up to 8 devices that the model, the batch and megatron-core can take."""
    sizes = range(1, DEVICES + 1)
    found = []
    for pp, tp, dp in ((a, b, c) for a in sizes for b in sizes for c in sizes if a * b * c <= DEVICES):
        if HEADS % tp or BATCH % dp:
            continue
        for vpp in (1, 2, 3):
            # The interleaved schedule wants micro-batches in whole rounds of stages.
            if vpp > 1 and (pp == 1 or pp * vpp > LAYERS or BATCH // dp % pp):
                continue
            for ep, etp in _expert_axes(tp, dp) if experts else [(1, tp)]:
                found.append(str(ParallelConfig(pp, tp, dp, vpp=vpp, ep=ep, etp=etp)))
    return found


def _expert_axes(tp: int, dp: int) -> Iterator[tuple[int, int]]:
    for ep in (1, 2, 4, 8):
        # Without expert parallelism Megatron takes experts for dense layers when it reduces gradients.
        for etp in {tp, 1} if ep > 1 else {tp}:
            if EXPERTS % ep == 0 and tp * dp % (ep * etp) == 0:
                yield ep, etp


def stages_of(pp: int, vpp: int) -> str:
    """Megatron's text for layers over virtual stages, as even as can be: the first ones have one more."""
    count = pp * vpp
    stages = ["t" * (LAYERS // count + (stage < LAYERS % count)) for stage in range(count)]
    return "|".join(["E" + stages[0], *stages[1:-1], stages[-1] + "L"] if count > 1 else ["E" + stages[0] + "L"])


def job_of(*, experts: bool, distributed: Sequence[str] = ()) -> Training:
    """The training job of walks and of fixed runs: the schedule of the learning rate is made for ``STEPS``."""
    uneven = [(pp, vpp) for pp in range(2, DEVICES + 1) for vpp in (1, 2, 3) if LAYERS % (pp * vpp)]
    moe: dict[str, Any] = (
        {"experts": EXPERTS, "ffn": 24, "expert_bias": True, "rms_norm": True, "biases": False} if experts else {}
    )
    return training(
        STEPS,
        layers=LAYERS,
        heads=HEADS,
        hidden=48,
        sequence_length=24,
        vocab_size=96,
        global_batch_size=BATCH,
        distributed=tuple(distributed),
        sequence_parallel=experts,
        stages=tuple(((pp, vpp), stages_of(pp, vpp)) for pp, vpp in uneven if pp * vpp <= LAYERS),
        **(moe if experts else {}),
    )


@dataclass(frozen=True, slots=True)
class Walk:
    """One walk.

    Attributes:
        experts: whether layers have experts.
        path: configurations in order; neighbours differ.
        distributed: those in which the distributed optimizer is used; in the others the plain one.
    """

    experts: bool
    path: tuple[str, ...]
    distributed: tuple[str, ...]

    @classmethod
    def random(cls, changes: int, seed: int, *, experts: bool) -> Walk:
        """A walk of so many changes; the seed decides it all."""
        draw = random.Random(seed)
        known = configurations(experts=experts)
        path = [draw.choice(known)]
        while len(path) <= changes:
            path.append(draw.choice([config for config in known if config != path[-1]]))
        return cls(experts, tuple(path), tuple(sorted(draw.sample(known, len(known) // 2))))

    def first(self, changes: int) -> Walk:
        """The beginning of the walk."""
        return replace(self, path=self.path[: changes + 1])

    @property
    def steps(self) -> int:
        """Steps of training on the way."""
        return len(self.path) // STEP_EVERY

    @property
    def scenario(self) -> Scenario:
        """As a scenario of the harness, for its adapter; its changes come from ``Steps``."""
        job = job_of(experts=self.experts, distributed=self.distributed)
        return Scenario(job, self.path[0], {0: "dp8"})


class Steps:
    """Announces the next configuration of a walk once the job is in the one before it, and has trained if it is to."""

    alike = True

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self.session: Session[Job] | None = None

    @property
    def changes(self) -> int:
        """Changes that are over."""
        assert self.session is not None
        return self.session._party.course.generation

    def trains(self, iteration: int) -> bool:
        """Whether a step of training comes next."""
        return iteration < (self.changes + 1) // STEP_EVERY

    def settled(self, resize: Resize, refusal: ShardshiftError | None) -> None:
        """A walk goes on."""

    def upcoming(self, iteration: int) -> Resize | None:
        """The next change, if the job is where it is due."""
        ended = self.changes + 1 == len(self._walk.path)
        if ended or self.trains(iteration):
            return None
        return Resize(iteration, ParallelConfig.parse(self._walk.path[self.changes + 1]))


def walk_it(send: Send, walk: Walk, folder: Path) -> None:
    """The worker: walk, and write down the state after each change and each step."""
    torch.set_num_threads(1)
    scenario, steps = walk.scenario, Steps(walk)
    with open_session(scenario) as elastic:
        steps.session, elastic._resizes = elastic, steps
        job = elastic.start(lambda job: initialise(scenario, job))
        while job:
            name = f"{steps.changes}-{job.iteration}"
            oracle.save_rank(job, folder / name)
            send(("saved", steps.changes, job.iteration, job.layout.rank, str(job.config)))
            if steps.trains(job.iteration):
                loss = train_step(job)
                with elastic.commit_step(job):
                    optimizer_step(job)
                at = job.layout.coordinate
                if loss is not None and at.tp == 0 and at.dp == 0:
                    send(("loss", job.iteration, loss))
            elif elastic.resize_due(job):
                job = elastic.resize(job) or elastic.start()
            else:
                break


def follow(walk: Walk) -> tuple[dict[int, float], int]:
    """Carry a walk out, and hold the whole state after each change against that before it.

    Returns:
        Losses by step, and how many changes were exact.

    Raises:
        AssertionError: naming the change after which a bit was wrong.
    """
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    saved: dict[tuple[int, int], int] = {}
    losses: dict[int, float] = {}
    last: tuple[int, oracle.Logical] | None = None
    exact = 0
    try:
        with LocalJob(DEVICES, walk_it, (walk, folder), timeout_s=TIMEOUT_S, preload=["shardshift.demo.worker"]) as job:
            for _, message in job.messages():
                match message:
                    case ("loss", int(iteration), float(loss)):
                        losses[iteration] = loss
                    case ("saved", int(change), int(iteration), int(), str(config)):
                        assert config == walk.path[change]
                        saved[change, iteration] = saved.get((change, iteration), 0) + 1
                        if saved[change, iteration] < ParallelConfig.parse(config).world_size:
                            continue
                        place = folder / f"{change}-{iteration}"
                        whole = oracle.assemble(oracle.read_ranks(place, weights_only=False))
                        shutil.rmtree(place)
                        if last is not None and last[0] == iteration:
                            step = f"change {change}, {walk.path[change - 1]} to {config}"
                            assert not (wrong := oracle.differences(last[1], whole)), f"{step}: {wrong[:5]}"
                            exact += 1
                        last = iteration, whole
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return losses, exact


def train_fixed(send: Send, recipe: Training, config: str) -> None:
    """The worker of a run that never changes."""
    torch.set_num_threads(1)
    scenario = Scenario(recipe, config, {})
    with open_session(scenario) as elastic:
        job = elastic.start(lambda job: initialise(scenario, job))
        while job and job.iteration < recipe.steps:
            loss = train_step(job)
            with elastic.commit_step(job):
                optimizer_step(job)
            at = job.layout.coordinate
            if loss is not None and at.tp == 0 and at.dp == 0:
                send((job.iteration, loss))


def fixed_losses(recipe: Training, config: str) -> dict[int, float]:
    """Losses by step of a run in one layout."""
    devices = ParallelConfig.parse(config).world_size
    return dict(message for _, message in run_processes(devices, train_fixed, recipe, config))


def measure(*, experts: bool) -> dict[str, Any]:
    """How far fixed runs lie apart."""
    recipe = job_of(experts=experts)
    runs = {config: fixed_losses(recipe, config) for config in (FIXED_EXPERTS if experts else FIXED)}
    apart = {
        f"{one} and {other}": max(abs(runs[one][step] - runs[other][step]) for step in runs[one])
        for one, other in pairwise([*runs, next(iter(runs))])
    }
    return {"losses": [*next(iter(runs.values())).values()], "apart": apart, "most": max(apart.values())}


def bounds() -> Mapping[str, Any]:
    """What was measured and committed."""
    found: dict[str, Any] = json.loads(BOUNDS.read_text())
    return found


if __name__ == "__main__":
    from tests.megatron import walking  # functions that processes can find by name

    if "--walk" in sys.argv:
        for name, bound in walking.bounds().items():
            walk = walking.Walk.random(100, seed=20 + (name == "experts"), experts=name == "experts")
            losses, exact = walking.follow(walk)
            apart = max(abs(loss - bound["losses"][step - 1]) for step, loss in losses.items())
            said = f"losses within {apart:.2g} (bound {bound['most']:.2g})"
            print(f"{name}: {exact} of 100 changes exact, {said}", flush=True)
        sys.exit()
    record = {name: walking.measure(experts=name == "experts") for name in ("dense", "experts")}
    BOUNDS.write_text(json.dumps(record, indent=2) + "\n")
    print({name: found["apart"] for name, found in record.items()})
