"""The adapter with an older megatron-core, and what it says of one that it cannot use or does not know.

``make test`` puts the older release beside the environment's own, in a folder that goes first on ``PYTHONPATH`` of a
process of its own; there real jobs train, change layout and train on, and are held against the oracle as everywhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import shardshift.adapters.megatron  # noqa: F401  # the stand-ins, before anything of megatron
from shardshift.adapters.megatron import versions
from shardshift.adapters.megatron.grid import Grid
from shardshift.adapters.megatron.meta import MetaJobs
from shardshift.values import Infeasible, ParallelConfig

# isort: split

import megatron.core
import megatron.core.models.gpt.gpt_layer_specs as specs
from megatron.core import parallel_state, process_groups_config

if not hasattr(specs, "get_gpt_decoder_layer_specs"):  # 0.15; only multi-token prediction needs it
    specs.get_gpt_decoder_layer_specs = None

from tests.megatron import harness
from tests.megatron.harness import Scenario, check_change, walk
from tests.megatron.training import build_model, training, wrap

from shardshift.demo import held

ROOT = Path(__file__).parents[2]
OLDER = sorted((ROOT / ".venv").glob("megatron-core-0.15.*[0-9]"))

SCENARIOS = {
    "fp32, SwiGLU, tensor ranks": walk("pp2tp1dp2", "pp1tp4dp1", "pp1tp2dp2", swiglu=True, tied=False),
    "bf16, distributed optimizer": walk(
        "pp1tp2dp2", "pp2tp1dp2", "pp1tp1dp4", precision="bf16", distributed=True, swiglu=True
    ),
    "experts": walk("dp2ep2", "pp2dp2", "dp4ep4", experts=4, biases=False, dense_first=True, distributed=True),
    "fp16, virtual stages": walk("pp2vpp2", "pp2tp2", layers=4, precision="fp16", dropout=0.1),
}


def run_older(send: Any, scenario: Scenario, *others: Any) -> None:
    """The worker of ``harness.run``, with an oracle that knows of SwiGLU's halves what 0.15 does not say."""
    by_attributes, halves = held._cut_of, 2 if scenario.recipe.shape.swiglu else 1

    def cut_of(parameter: Any, name: str) -> held.Cut | None:
        cut = by_attributes(parameter, name)
        return (cut[0], halves, *cut[2:]) if cut and ".linear_fc1." in name else cut

    with patch.object(held, "_cut_of", cut_of):
        harness.run_scenario(send, scenario, *others)


def main() -> None:
    """What the process with the older release runs."""
    print(megatron.core.__version__, flush=True)
    for name, scenario in SCENARIOS.items():
        with tempfile.TemporaryDirectory() as folder, patch.object(harness, "run_scenario", run_older):
            outcome = harness.run(scenario, Path(folder), unmigrated=True)
        for change in scenario.changes:
            check_change(outcome, change)
        first = min(scenario.changes) + 1
        # An oracle and an adapter that are wrong alike would not find this: the model is another one then.
        assert outcome.losses[first] == pytest.approx(outcome.unmigrated[first], rel=2e-3), name
        print(name, flush=True)


@pytest.mark.skipif(not OLDER, reason="make test (or make setup) puts an older megatron-core into .venv")
@pytest.mark.timeout(240)
def test_jobs_change_layout_with_an_older_release() -> None:
    path = os.pathsep.join([str(OLDER[-1]), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    script = "from tests.megatron.test_versions import main; main()"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert run.stdout.splitlines() == [OLDER[-1].name.removeprefix("megatron-core-"), *SCENARIOS]


def test_the_halves_of_a_gated_matrix_are_cut_each_by_itself_whether_or_not_megatron_says_so() -> None:
    recipe = training(1, swiglu=True, tied=False, experts=2, shared_expert=8)

    def silent(layout: Any) -> Any:
        """The model as an older release makes it."""
        chunks = build_model(recipe, layout)
        for chunk in chunks:
            for parameter in chunk.parameters():
                if getattr(parameter, "partition_stride", 1) > 1:
                    parameter.partition_stride = 1  # type: ignore[attr-defined]
        return chunks

    def shapes(build: Any) -> dict[str, tuple[int, ...]]:
        config = ParallelConfig.parse("tp2etp2")
        meta = MetaJobs(build, lambda chunks, layout: wrap(recipe, chunks, layout))
        grid = Grid(config, meta.stages(config), meta.wholes(), (), None)
        return {slot.name: slot.pieces[0].shard.tensor.shape for slot in grid.of_rank(1) if "linear_fc1" in slot.name}

    found = shapes(silent)
    assert found == shapes(lambda layout: build_model(recipe, layout))
    assert len(found) == 6
    assert all(shape[0] == 2 for shape in found.values())


def test_this_release_has_all_that_is_needed_and_is_used_without_a_word() -> None:
    assert versions.lacking() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with versions.supported():
            pass


def test_a_release_that_lacks_names_or_parameters_is_refused_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(process_groups_config, "ProcessGroupCollection")
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", lambda tensor_model_parallel_size=1: None)
    with pytest.raises(Infeasible) as refused, versions.supported():
        from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: F401
    text = str(refused.value)
    for name in ("process_groups_config.ProcessGroupCollection", "(expert_tensor_parallel_size=...)", "0.15.x and"):
        assert name in text
    assert isinstance(refused.value.__cause__, ImportError)


def test_an_error_that_is_not_megatrons_stays_what_it_is() -> None:
    with pytest.raises(AttributeError, match="nonsense"), versions.supported():
        getattr(torch, "nonsense")  # noqa: B009


def test_without_megatron_core_the_import_says_so() -> None:
    with pytest.raises(ModuleNotFoundError), versions.supported():
        raise ModuleNotFoundError("No module named 'megatron'", name="megatron")


def test_an_unknown_release_with_all_names_warns_of_what_is_known_to_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.99.0")
    with pytest.warns(UserWarning, match=r"not been tested with megatron-core 0\.99\.0, only with 0\.15\.x and"):
        versions.warn_untested()
