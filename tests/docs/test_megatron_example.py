"""examples/megatron: a training loop before and after shardshift, the lines between them, and what both print."""

from __future__ import annotations

import builtins
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.docs.differences import check_difference, lines_of

from shardshift import Infeasible, ParallelConfig
from shardshift.elastic import LocalJob

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "megatron"
PAGE = (ROOT / "docs" / "megatron.md").read_text()
BEFORE, AFTER = EXAMPLE / "pretrain_gpt_before.py", EXAMPLE / "pretrain_gpt.py"
SURVIVING = EXAMPLE / "pretrain_gpt_surviving.py"
MOST_LINES = 15
STEPS = 6

DEVICES = 4
TINY = "--train-iters 6 --hidden-size 16 --seq-length 16 --num-layers 4 --num-workers 0"


@dataclass(frozen=True)
class Step:
    """What a program prints of one step: the learning rate and the samples are compared as they stand there."""

    loss: float
    rate: str
    samples: str


def steps_in(text: str) -> dict[int, Step]:
    found = re.findall(r"^step (\d+): loss (\S+), lr (\S+), samples (\S+)$", text, re.MULTILINE)
    assert len(found) == len({number for number, *_ in found}), "a step was made twice"
    return {int(number): Step(float(loss), rate, samples) for number, loss, rate, samples in found}


def check(fixed: Mapping[int, Step], changed: Mapping[int, Step], first_change: int, tolerance: float) -> None:
    """Bit for bit the same up to the first change; afterwards the same samples, and losses as near as layouts are."""
    assert list(changed) == list(fixed) == list(range(1, len(fixed) + 1))
    for number, step in changed.items():
        if number <= first_change:
            assert step == fixed[number]
        assert (step.samples, step.rate) == (fixed[number].samples, fixed[number].rate)
        assert step.loss == pytest.approx(fixed[number].loss, abs=tolerance)
    assert len({step.samples for step in fixed.values()}) == len(fixed), "steps cannot be told apart by their samples"


# The lines


def test_at_most_fifteen_lines_are_added_or_changed_and_the_page_shows_them() -> None:
    check_difference(PAGE, BEFORE, AFTER, MOST_LINES)


def test_the_page_shows_the_loop_that_outlives_losses() -> None:
    shown = re.search(r"```python\n(.*?survive=True.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    loop = [line.strip() for line in shown[1].splitlines()]
    program = [line.strip() for line in lines_of(SURVIVING)]
    first = program.index(loop[0])
    assert program[first : first + len(loop)] == loop


def test_what_the_programs_share_knows_nothing_of_shardshift() -> None:
    for file in ("common.py", "make_data.py", BEFORE.name):
        assert "shardshift" not in (EXAMPLE / file).read_text()


# Through torchrun, as documented


def documented_commands() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.replace("\\\n", "").splitlines()]


def typed(command: list[str], folder: Path) -> str:
    """What a command prints, called as from the root of a checkout, whose own files it leaves alone."""
    for name in ("examples", "src"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    programs = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    process = subprocess.run(
        [*programs[command[0]], *command[1:]],
        cwd=folder,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-5000:]
    return process.stdout


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_documented_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    make_data, before, after = documented_commands()
    assert (make_data[0], before[0], after[0]) == ("python", "torchrun", "torchrun")
    assert make_data[-1] == "examples/megatron/declaration.txt"  # a text that changes with nothing else here
    typed(make_data, tmp_path)
    changed = steps_in(typed(after, tmp_path))
    # The other program is started alike, with the same options; here in processes that need not import first.
    assert before == [*after[:4], str(BEFORE.relative_to(ROOT)), *after[5:9]]
    fixed = printed_by(BEFORE, " ".join(before[5:]).replace("text", str(tmp_path / "text")))
    check(fixed, changed, first_change=4, tolerance=1e-5)
    shown = steps_in(PAGE)
    assert list(shown) == list(changed)
    for number, step in shown.items():
        assert changed[number].loss == pytest.approx(step.loss, abs=1e-3)


# In processes of our own, which start sooner


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of many lengths and random bytes, so that no two samples are alike."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix, generator = tmp_path_factory.mktemp("data") / "text", np.random.default_rng(7)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in generator.integers(5, 60, 40):
        builder.add_item(torch.from_numpy(generator.integers(0, 256, int(length))))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def run_program(send: Any, program: Path, options: str) -> None:
    """One process of a program, as torchrun would start it, except for its prints."""
    torch.set_num_threads(1)
    # One that a fork server has started would start its loaders from another one, which imports everything anew.
    multiprocessing.set_start_method("fork", force=True)
    sys.argv = [str(program), *options.split()]
    sys.path.insert(0, str(EXAMPLE))
    import shardshift.adapters.megatron  # noqa: F401  (the stand-ins, as in on_cpu.py)

    builtins.print = lambda *texts, **_: send(" ".join(map(str, texts)))  # in what the program imports, too
    exec(compile(program.read_text(), str(program), "exec"), {"__name__": "__main__", "__builtins__": builtins})


def run_and_be_lost(send: Any, program: Path, options: str, lost: int, at: int) -> None:
    """One process of a program; device ``lost`` ends before the optimizer step ``at`` + 1."""
    from shardshift.elastic import Session

    commit_step: Any = Session.commit_step

    def ends(self: Any, job: Any) -> Any:
        if (os.environ["RANK"], job.iteration) == (str(lost), at):
            os.kill(os.getpid(), signal.SIGKILL)
        return commit_step(self, job)

    Session.commit_step = ends  # type: ignore[method-assign]
    run_program(send, program, options)


def printed_by_survivors(program: Path, options: str, lost: int, at: int) -> dict[int, Step]:
    arguments, preload = (program, options, lost, at), ["shardshift.demo.worker"]
    with LocalJob(DEVICES, run_and_be_lost, arguments, timeout_s=60, preload=preload, survives=True) as job:
        return steps_in("\n".join(text for _, text in job.messages()))


def printed_by(program: Path, options: str) -> dict[int, Step]:
    with LocalJob(DEVICES, run_program, (program, options), timeout_s=60, preload=["shardshift.demo.worker"]) as job:
        return steps_in("\n".join(text for _, text in job.messages()))


SCENARIOS = {
    "fp32, processes that leave and come back": ("", "pp2tp2dp1", "2:pp1tp2dp1,3:pp2tp1dp2,5:pp4tp1dp1", 1e-5),
    "bf16 and the distributed optimizer, all that can overlap does": (
        "--bf16 --use-distributed-optimizer --overlap",
        "pp1tp2dp2",
        "2:pp1tp1dp4,4:pp2tp2dp1",
        2e-2,
    ),
    "interleaved pipeline": ("--use-distributed-optimizer", "pp2tp2dp1vpp2", "2:pp4tp1dp1,4:pp2tp1dp2vpp2", 1e-5),
    "mixture of experts": ("--num-experts 4", "pp1tp1dp4ep2", "2:pp2tp1dp2ep2,4:pp1tp1dp4ep4", 1e-5),
}


@pytest.mark.slow
@pytest.mark.parametrize(("options", "layout", "resize", "tolerance"), SCENARIOS.values(), ids=SCENARIOS.keys())
def test_the_loop_goes_on_through_changes_as_if_there_were_none(
    options: str, layout: str, resize: str, tolerance: float, data_path: str
) -> None:
    options = f"--data-path {data_path} {TINY} {options} --layout {layout}"
    fixed = printed_by(BEFORE, options)
    changed = printed_by(AFTER, f"{options} --resize {resize}")
    check(fixed, changed, first_change=2, tolerance=tolerance)
    assert [step.samples for step in fixed.values()] == expected_samples(data_path)


def run_and_count(send: Any, program: Path, options: str) -> None:
    """One process of a program; after each change it tells how many processes load data for it."""
    from shardshift.elastic import Session

    resize: Any = Session.resize

    def counting(self: Any, job: Any) -> Any:
        job = resize(self, job)
        send(f"loaders {'none' if job is None else len(multiprocessing.active_children())}")
        return job

    Session.resize = counting  # type: ignore[method-assign]
    run_program(send, program, options)


def test_processes_that_load_data_end_with_their_layout(data_path: str) -> None:
    """What they have fetched ahead is for the old layout: it is dropped, and each sample is still used once."""
    options = f"--data-path {data_path} {TINY} --num-workers 2 --layout pp1tp1dp2 --resize 2:pp2,4:pp1tp1dp1"
    with LocalJob(2, run_and_count, (AFTER, options), timeout_s=60, preload=["shardshift.demo.worker"]) as job:
        printed = "\n".join(text for _, text in job.messages())
    assert sorted(re.findall(r"^loaders (\w+)$", printed, re.MULTILINE)) == ["2", "2", "2", "none"]
    samples = [step.samples for step in steps_in(printed).values()]
    assert samples == expected_samples(data_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "layout", "tolerance"),
    [
        ("", "pp2tp1dp2", 1e-5),
        ("--bf16 --use-distributed-optimizer --overlap", "pp1tp2dp2", 2e-2),
    ],
    ids=["fp32", "bf16 and the distributed optimizer, with copies"],
)
def test_the_surviving_loop_goes_on_without_a_rank_as_if_none_were_lost(
    options: str, layout: str, tolerance: float, data_path: str
) -> None:
    options = f"--data-path {data_path} {TINY} {options} --layout {layout}"
    fixed = printed_by(BEFORE, options)
    survived = printed_by_survivors(SURVIVING, options, lost=1, at=3)
    check(fixed, survived, first_change=3, tolerance=tolerance)


def test_a_change_that_cannot_be_ends_the_program_with_the_reason(data_path: str) -> None:
    with pytest.raises(Infeasible, match=r"global batch of 8 is not divisible by micro-batch 2 x dp 3"):
        printed_by(AFTER, f"--data-path {data_path} {TINY} --layout pp1tp2dp2 --resize 1:pp1tp1dp3")


# The order of samples, by another way than that of the programs


def expected_samples(data_path: str) -> list[str]:
    """The samples of each step, read one by one, in the order of the dataset, by a process without any layout."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        from common import ByteTokenizer, fingerprint  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(EXAMPLE))
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    batch = 8
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=16,
        blend=([data_path], None),
        split="1,0,0",
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    sizes = [STEPS * batch, 0, 0]
    dataset, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    steps = [[dataset[number] for number in range(step * batch, (step + 1) * batch)] for step in range(STEPS)]
    return [f"{sum(int(fingerprint({k: v[None] for k, v in sample.items()})) for sample in step):x}" for step in steps]


def test_the_sampler_gives_every_layout_the_same_global_batches_in_order() -> None:
    sys.path.insert(0, str(EXAMPLE))
    try:
        from common import PretrainingSampler
    finally:
        sys.path.remove(str(EXAMPLE))
    for config in map(ParallelConfig.parse, ("dp1", "dp2", "dp4", "dp3")):
        for consumed in (0, 12):
            ranks = [list(PretrainingSampler(48, consumed, 2, rank, config.dp)) for rank in range(config.dp)]
            in_order = [number for batches in zip(*ranks, strict=True) for batch in batches for number in batch]
            whole = (48 - consumed) // (2 * config.dp) * (2 * config.dp)
            assert in_order == list(range(consumed, consumed + whole))
