"""examples/fsdp2: a training loop before and after shardshift, the lines between them, and what both print."""

from __future__ import annotations

import builtins
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.docs.differences import check_difference

from shardshift.adapters.dtensor.parts import parts_of
from shardshift.elastic import LocalJob

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "fsdp2"
PAGE = (ROOT / "docs" / "fsdp.md").read_text()
BEFORE, AFTER = EXAMPLE / "before.py", EXAMPLE / "after.py"
MOST_LINES = 15

Losses = dict[int, tuple[str, str]]
"""Per step its loss, with every digit that tells one float from another, and the learning rate."""


def losses_in(text: str) -> Losses:
    found = re.findall(r"^step (\d+): loss (\S+), lr (\S+)$", text, re.MULTILINE)
    assert len(found) == len({number for number, *_ in found}), "a step was made twice"
    return {int(number): (loss, rate) for number, loss, rate in found}


# The lines


def test_the_page_shows_the_lines_that_are_added_or_changed_and_counts_them() -> None:
    check_difference(PAGE, BEFORE, AFTER, MOST_LINES)


def test_what_the_programs_share_knows_nothing_of_shardshift() -> None:
    for file in ("common.py", BEFORE.name):
        assert "import shardshift" not in (EXAMPLE / file).read_text()


# What they print


def run_program(send: Any, program: Path, options: str) -> None:
    """One process of a program, as torchrun would start it, except for its prints."""
    torch.set_num_threads(1)
    sys.argv = [str(program), *options.split()]
    sys.path.insert(0, str(EXAMPLE))
    builtins.print = lambda *texts, **_: send(" ".join(map(str, texts)))  # in what the program imports, too
    exec(compile(program.read_text(), str(program), "exec"), {"__name__": "__main__", "__builtins__": builtins})


def printed_by(devices: int, worker: Any, *arguments: Any) -> str:
    with LocalJob(devices, worker, arguments, timeout_s=60, preload=["shardshift.demo.worker"]) as job:
        return "\n".join(text for _, text in job.messages())


def through_checkpoints(folder: Path) -> Losses:
    """The four layouts of the example, each by processes of its own that start from the former one's checkpoint."""
    found: Losses = {}
    legs = [(4, "--dp 4", 4), (4, "--dp 2 --tp 2", 8), (2, "--dp 2", 12), (4, "--dp 4", 16)]
    for devices, layout, until in legs:
        load = f"--load {folder / str(max(found))}" if found else ""
        options = f"{layout} {load} --until {until} --save {folder / str(until)}"
        found |= losses_in(printed_by(devices, run_program, BEFORE, options))
    return found


@pytest.mark.timeout(240)
def test_the_documented_command_prints_the_losses_of_the_same_loop_through_checkpoints_to_the_last_bit(
    tmp_path: Path,
) -> None:
    block = re.search(r"```sh\n(torchrun .*examples/fsdp2/after.*)\n```", PAGE)
    assert block is not None
    command = shlex.split(block[1])
    process = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1:]],
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr[-5000:]
    changed = losses_in(process.stdout)
    assert list(changed) == list(range(1, 17))
    assert changed == through_checkpoints(tmp_path)
    shown = losses_in(PAGE)
    assert list(shown) == list(changed)
    for number, (loss, rate) in shown.items():
        assert float(changed[number][0]) == pytest.approx(float(loss), abs=1e-3)
        assert changed[number][1] == rate


def ask_first(send: Any, program: Path, options: str) -> None:
    """The program, up to its first change, of which it asks what it would come to."""
    import shardshift as ss

    def asked(job: Any, build: Any, to: Any) -> None:
        found = ss.dry_run(job, build, to)
        if job.rank == 0:
            send(str(found))
        raise SystemExit(0)

    ss.migrate = asked  # type: ignore[assignment]
    run_program(lambda text: None, program, options)


def test_the_page_shows_what_a_dry_run_says_of_the_first_change() -> None:
    said = printed_by(4, ask_first, AFTER, "--dp 4")
    assert f"```text\n{said}\n```" in PAGE


# The names of another framework


def test_the_names_that_the_page_gives_are_those_of_the_tensors_that_megatron_has_fused() -> None:
    block = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1], names)
    names |= {"HIDDEN": 6, "FFN": 5, "HEAD": 4, "GROUPS": 3, "QUERIES": 2}
    queries, groups, head = 2, 3, 4
    fused = torch.arange(groups * (queries + 2) * head * 6.0).view(-1, 6)
    split = fused.view(groups, queries + 2, head, 6)
    gated = torch.arange(2 * 5 * 6.0).view(2, 5, 6)
    layer = "model.layers.7."
    expected = {
        f"{layer}self_attn.q_proj.weight": (fused, split[:, :queries].reshape(-1, 6)),
        f"{layer}self_attn.k_proj.weight": (fused, split[:, queries].reshape(-1, 6)),
        f"{layer}self_attn.v_proj.weight": (fused, split[:, queries + 1].reshape(-1, 6)),
        f"{layer}mlp.gate_proj.weight": (gated, gated[0]),
        f"{layer}mlp.up_proj.weight": (gated, gated[1]),
    }
    for name, (whole, tensor) in expected.items():
        found = torch.full_like(tensor, torch.nan)
        for part in parts_of(name, tuple(tensor.shape), names["megatrons"]):
            assert part.shape == tuple(whole.shape)
            at = tuple(map(slice, part.at.offsets, part.at.stops))
            box = tuple(map(slice, part.box.offsets, part.box.stops))
            found[at] = whole[box].reshape(found[at].shape)
        assert torch.equal(found, tensor), name
    for name, other in {
        "model.layers.0.self_attn.o_proj.weight": "decoder.layers.0.self_attention.linear_proj.weight",
        "model.layers.1.input_layernorm.weight": "decoder.layers.1.input_layernorm.weight",
        "lm_head.weight": "output_layer.weight",
    }.items():
        assert names["megatrons"](name, (2, 2)) == other
