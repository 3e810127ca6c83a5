"""The manifests and the batch script in examples: as far as can be told without a cluster, they are what is asked for.

Kubernetes objects are read into the models of JobSet's and Kubeflow Trainer's own API (generated from their OpenAPI)
and written out again: a field that the API does not know, or of another type, does not come back.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as api
import pytest
import yaml
from typer.main import get_command

from shardshift.cli.app import app

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = {"jobset.yaml": api.JobsetV1alpha2JobSet, "trainjob.yaml": api.TrainerV1alpha1TrainJob}


def manifest(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((EXAMPLES / "kubernetes" / name).read_text())
    return document


def run_options(command: list[str]) -> dict[str, Any]:
    """What shardshift's own command line makes of a command, which it is not to run."""
    assert command[:2] == ["shardshift", "run"]
    run = get_command(app).commands["run"]  # type: ignore[attr-defined]
    return dict(run.make_context("run", command[2:]).params)


@pytest.mark.parametrize("name", MODELS)
def test_a_manifest_is_one_of_its_api(name: str) -> None:
    document = manifest(name)
    read = MODELS[name].from_dict(document)
    assert read is not None
    assert plain(read.to_dict()) == document


def plain(value: Any) -> Any:
    """Models write numbers of resources as wrappers, and empty metadata."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return getattr(value, "actual_instance", value)


def test_a_field_that_the_api_does_not_know_is_found() -> None:
    document = manifest("jobset.yaml")
    document["spec"]["replicas"] = 1
    read = MODELS["jobset.yaml"].from_dict(document)
    assert read is not None
    assert plain(read.to_dict()) != document


def test_the_jobset_meets_at_its_first_pod_and_leaves_before_the_kubelet_kills() -> None:
    document = manifest("jobset.yaml")
    spec = document["spec"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    options = run_options([*container["command"], *container["args"]])
    # <jobSet.name>-<replicatedJob.name>-<job-index>-<pod-index>.<subdomain>, as JobSet's documentation has it
    first = f"{document['metadata']['name']}-{replicated['name']}-0-0.{spec['network']['subdomain']}"
    assert options["rdzv_endpoint"].rpartition(":")[0] == first
    assert options["grace_s"] < pod["terminationGracePeriodSeconds"]
    assert int(options["nnodes"].rpartition(":")[2]) == job["parallelism"] == job["completions"]
    assert int(options["nproc_per_node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert job["podFailurePolicy"]
    assert pod["restartPolicy"] == "Never"  # which a podFailurePolicy needs


def test_the_trainjob_starts_as_many_processes_as_it_asks_for() -> None:
    trainer = manifest("trainjob.yaml")["spec"]["trainer"]
    assert trainer["command"] == ["bash", "-c"]
    (line,) = trainer["args"]
    subprocess.run(["bash", "-n", "-c", line], check=True)
    first, *words = shlex.split(line)
    assert first == "exec"
    options = run_options(words)
    assert options["rdzv_endpoint"] == "$PET_MASTER_ADDR:$PET_MASTER_PORT"
    assert options["grace_s"] < 30  # Kubernetes' default
    assert int(options["nnodes"].rpartition(":")[2]) == trainer["numNodes"]
    assert int(options["nproc_per_node"]) == trainer["numProcPerNode"]


def test_the_batch_script_starts_one_agent_on_each_host_and_more_join_the_first(tmp_path: Path) -> None:
    """Run with stand-ins for scontrol and srun, which write down what they are asked."""
    (tmp_path / "scontrol").write_text("#!/bin/bash\nprintf 'a1\\na2\\n'\n")
    (tmp_path / "srun").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\n')
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    script = EXAMPLES / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    for more, endpoint in (({}, "a1:29400"), ({"ENDPOINT": "b7:29400"}, "b7:29400")):
        (tmp_path / "asked").unlink(missing_ok=True)
        subprocess.run([script], check=True, env=variables | more, timeout=20)
        asked = sorted((tmp_path / "asked").read_text().splitlines())
        assert [line.partition("--nodelist=")[2].split()[0] for line in asked] == ["a1", "a2"]
        for line in asked:
            options = run_options(["shardshift", *line.partition(" shardshift ")[2].split()])
            assert (options["rdzv_endpoint"], options["nnodes"]) == (endpoint, "2:64")


@pytest.mark.parametrize("name", ["kubernetes/jobset.yaml", "kubernetes/trainjob.yaml", "slurm/train.sbatch"])
def test_what_was_not_run_says_so(name: str) -> None:
    assert "NOT RUN ON A CLUSTER" in (EXAMPLES / name).read_text()
