"""``shardshift plan``, ``explain`` and ``bench`` as they are typed: exit codes, what is on stdout, what is refused."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tests.cli.shell import Shell, make_shell

from shardshift import session
from shardshift.cli.options import byte_size, device_list
from shardshift.plan.summary import STAGING_BYTES
from shardshift.values import ParallelConfig

SMALL = ["--layers", "8", "--hidden", "64", "--heads", "8", "--vocab", "100"]
KEYS = [
    *("prev", "curr", "method", "digest", "state_bytes", "referred_bytes", "copied_bytes", "moved_bytes"),
    *("cross_node_bytes", "least_moved_bytes", "lower_bound_s", "predicted_s", "peak_extra_bytes", "free_nodes"),
    *("cross_node_tp_groups", "plan_s", "pairs", "instructions"),
]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """Run a command line in this process."""
    return make_shell(monkeypatch, capsys)


# plan


def test_json_has_stdout_to_itself_and_the_agreed_keys(shell: Shell) -> None:
    done = shell("plan", "pp4tp2", "pp6tp4", "--model", "gpt3-32b", "--topology", "cluster-a", "--json")
    assert done.code == 0
    record = done.json
    assert list(record) == KEYS
    assert list(record["instructions"]) == ["refer", "copy", "send", "recv", "forward"]
    assert [pair["curr"] for pair in record["pairs"]] == list(range(24))
    assert record["free_nodes"] == 26
    assert record["least_moved_bytes"] <= record["moved_bytes"]
    assert record["lower_bound_s"] <= record["predicted_s"]
    assert "the lower bound" in done.err


def test_words_are_on_stdout_and_fit_80_columns(shell: Shell) -> None:
    done = shell("plan", "pp4tp2dp3", "pp4tp8", *SMALL, "--devices-per-node", "4")
    assert (done.code, done.err) == (0, "")
    assert "pp4tp2dp3 → pp4tp8dp1, 8 layers of 64 (537,472 parameters), exact" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_methods_differ_in_what_they_move(shell: Shell) -> None:
    moved = {}
    for method in ("exact", "paper", "migrate-then-defragment"):
        record = shell("plan", "pp8", "pp4", *SMALL, "--devices-per-node", "4", "--method", method, "--json").json
        assert record["method"] == method
        moved[method] = record["moved_bytes"], record["free_nodes"]
    assert moved["exact"][1] == moved["migrate-then-defragment"][1] == 1
    assert moved["paper"][1] == 0
    assert moved["exact"][0] < moved["migrate-then-defragment"][0]


def test_no_free_node_is_worth_any_byte_if_it_is_worth_nothing(shell: Shell) -> None:
    asked = ["plan", "pp8", "pp4", *SMALL, "--devices-per-node", "4", "--json"]
    bytes_alone = shell(*asked, "--node-worth", "0").json
    assert bytes_alone["moved_bytes"] == bytes_alone["least_moved_bytes"]
    assert shell(*asked).json["free_nodes"] == 1


def test_more_than_the_least_is_explained_by_what_it_bought(shell: Shell) -> None:
    asked = ["plan", "pp8", "pp4", *SMALL, "--devices-per-node", "4"]
    text = " ".join(shell(*asked).out.split())
    assert "more than the least, for 1 more free node (--node-worth 0: the least)" in text
    assert "more than the least" not in shell(*asked, "--node-worth", "0").out
    phases = " ".join(shell(*asked, "--method", "migrate-then-defragment").out.split())
    assert "more than the least, by its two phases" in phases
    assert "over all devices; sum of two phases" in phases


def test_rates_nodes_and_what_the_time_is_of_are_said(shell: Shell) -> None:
    done = shell("plan", "pp8", "pp4", *SMALL, "--devices-per-node", "4")
    assert "on 2 nodes x 4, 25 GB/s a device, 400 Gb/s a node (default rates)" in done.out
    assert "the move alone, not the pause" in done.out
    assert "the lower bound of this placement" in done.out
    assert "of old state" in " ".join(done.out.split())
    assert "(cluster-b)" in shell("plan", "pp8", "pp4", *SMALL, "--topology", "cluster-b").out


def test_many_devices_of_which_no_node_is_known_are_said_to_be_one_node(shell: Shell) -> None:
    hint = "all devices count as one node: --devices-per-node or --topology"
    for command in ("plan", "explain"):
        assert hint in shell(command, "pp1dp18", "pp1dp17", *SMALL).out
        assert hint not in shell(command, "pp1dp16", "pp1dp15", *SMALL).out
        assert hint not in shell(command, "pp1dp18", "pp1dp17", *SMALL, "--devices-per-node", "18").out


def test_where_nothing_moves_no_lane_is_busiest(shell: Shell) -> None:
    done = shell("plan", "pp2dp2", "pp2", *SMALL)
    assert "nothing has to move" in done.out
    assert "busiest" not in done.out
    assert "predicted" not in done.out


def test_several_layouts_are_compared_on_one_topology(shell: Shell) -> None:
    asked = ["plan", "pp4tp2", "pp8tp2", "pp4", "pp2tp2"]
    done = shell(*asked, *SMALL, "--devices-per-node", "4")
    assert (done.code, done.err) == (0, "")
    assert "on 4 nodes x 4" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    records = shell(*asked, *SMALL, "--devices-per-node", "4", "--json").json
    assert [record["curr"] for record in records] == ["pp8tp2dp1", "pp4tp1dp1", "pp2tp2dp1"]
    assert all(list(record) == KEYS for record in records)
    alone = shell("plan", "pp4tp2", "pp8tp2", *SMALL, "--devices-per-node", "4", "--json").json
    assert {**records[0], "plan_s": 0} == {**alone, "plan_s": 0}


def test_of_several_layouts_one_that_cannot_be_leaves_the_others_and_ends_with_3(shell: Shell) -> None:
    done = shell("plan", "pp4", "pp2", "tp3", *SMALL, "--json")
    assert done.code == 3
    good, bad = done.json
    assert list(good) == KEYS
    assert (bad["prev"], bad["curr"]) == ("pp4tp1dp1", "pp1tp3dp1")
    assert "not divisible by tp 3" in bad["error"]
    assert "pp1tp3dp1 cannot be: " in done.err


def test_only_listed_devices_run_the_new_layout_and_the_others_leave(shell: Shell) -> None:
    asked = ["plan", "pp4", "pp3", *SMALL, "--prev-devices", "4-6,9", "--devices", "5,6,20-21", "--json"]
    record = shell(*asked).json
    assert {pair["device"] for pair in record["pairs"]} <= {5, 6, 20, 21}
    assert {pair["device"]: pair["prev"] for pair in record["pairs"]}[5] == 1


def test_lost_devices_are_made_good_by_replicas_or_refused_with_names(shell: Shell) -> None:
    done = shell("plan", "pp2dp2", "pp2", *SMALL, "--lost", "1,2", "--json")
    assert done.code == 0
    assert {pair["device"] for pair in done.json["pairs"]} == {0, 3}
    done = shell("plan", "pp2dp2", "pp2", *SMALL, "--lost", "0,1", "--json")
    assert (done.code, done.out) == (3, "")
    assert "error: StateLost: " in done.err
    assert "decoder.layers.0." in done.err
    assert "and " in done.err
    assert "if they still live, use --leave" in done.err
    assert len(done.err) < 1500


def test_leaving_devices_send_what_only_they_hold_and_get_no_rank(shell: Shell) -> None:
    done = shell("plan", "pp2dp2", "pp2", *SMALL, "--leave", "0,1", "--json")
    assert done.code == 0
    assert {pair["device"] for pair in done.json["pairs"]} == {2, 3}
    assert done.json["moved_bytes"] > 0


def test_a_zero1_job_is_planned_by_ranges(shell: Shell) -> None:
    whole, ranges = (shell("plan", "pp2dp2", "pp2dp4", *SMALL, *more, "--json").json for more in ([], ["--zero1"]))
    assert ranges["state_bytes"] == whole["state_bytes"]
    assert ranges["moved_bytes"] < whole["moved_bytes"]


def test_a_job_of_thousands_has_its_pairs_in_runs(shell: Shell) -> None:
    record = shell("plan", "pp2dp2200", "pp2dp2400", *SMALL, "--devices-per-node", "8", "--json").json
    assert len(record["pairs"]) < 20
    assert sum(run.get("count", 1) for run in record["pairs"]) == 4800


def test_a_model_may_be_a_file_and_a_topology_too(shell: Shell, tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 4, "n_embd": 32, "n_head": 4, "n_positions": 16, "vocab_size": 60}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "cluster.toml").write_text("nodes = 2\ndevices_per_node = 2\n[device]\ngbit_per_s = 8\n")
    files = ["--model", str(tmp_path / "config.json"), "--topology", str(tmp_path / "cluster.toml")]
    done = shell("plan", "pp4", "pp2", *files, "--json")
    assert done.code == 0
    assert done.json["lower_bound_s"] >= done.json["least_moved_bytes"] / 4 / 1e9


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pp4", "pp4x"], "not a parallel configuration"),
        (["pp4tp3", "pp4"], "heads 32 is not divisible by tp 3"),
        (["pp4", "pp2", "--model", "gpt5"], "no model is called 'gpt5'"),
        (["pp4", "pp2", "--model", "missing.json"], "cannot be read"),
        (["pp4", "pp2", "--topology", "cluster-z"], "no topology 'cluster-z'"),
        (["pp4", "pp8", "--devices", "0-3"], "needs 8 devices, 4 are available"),
        (["pp4", "pp2", "--nodes", "1", "--devices-per-node", "2"], "outside a topology"),
        (["pp4", "pp2", "--lost", "2", "--devices", "0-3"], "are lost, yet offered"),
        (["pp16", "pp8", "--model", "gpt3-64b", "--topology", "cluster-a"], "its memory is 42949672960"),
        (["pp4", "pp2cp2", "--method", "paper"], "knows only pp, tp, dp"),
        (["pp4", "pp2dp99999999"], "has 199999998 ranks"),
        (["pp4", "pp2", "--prev-devices", "0-2"], "runs on 4 devices, not on the 3 named"),
        (["pp4", "pp2", "--lost", "9"], "devices 9 are lost, but pp4tp1dp1 does not run on them"),
        (["pp4", "pp2", "--leave", "9"], "device 9 of --leave is not one of 4"),
        (["pp4", "pp2", "--leave", "3", "--lost", "3"], "in --lost and in --leave"),
        (["pp4", "pp2", "--leave", "3", "--devices", "0-3"], "leave, yet are offered"),
        (["pp4", "pp4", "--leave", "3"], "needs 4 devices, 3 are available; what to do: add devices (--nodes N"),
        (["pp4", "pp4", "--leave", "3", "--devices-per-node", "2"], "add devices (--nodes N"),
        (["pp4", "pp4", "--leave", "3", "--nodes", "2", "--devices-per-node", "2"], "add devices, or choose"),
        (["pp4", "pp-2"], "not a parallel configuration: 'pp-2'"),
        (["pp4", "pp2", "--staging", "1"], "an element of 4 bytes has to move, the staging bound is 1"),
        (["pp4", "pp2", "--layers", "100000000", "--hidden", "64", "--heads", "4"], "layers is 100000000"),
        (["pp4", "pp2", *SMALL[:6], "--vocab", "9" * 23], "vocab is a number of 77 bits"),
        (["pp4", "pp2", *SMALL[:6], "--vocab", str(2**61)], "the most is 2**62"),
        (["pp4", "pp2", "--nodes", "1000000000", "--devices-per-node", "1000000000"], "more than a topology may have"),
        (["pp4", "pp2", "--devices-per-node", "9" * 20], "more than a topology may have"),
        (["pp4", "pp2", "--model", "[/bold].json"], "[/bold].json cannot be read"),
    ],
)
def test_what_cannot_be_ends_with_3_and_says_why(shell: Shell, arguments: list[str], says: str) -> None:
    done = shell("plan", *arguments, "--json")
    assert (done.code, done.out) == (3, "")
    assert says in done.err
    assert "what to do" in done.err.lower()


@pytest.mark.parametrize(
    "arguments",
    [
        ["pp4"],
        ["pp4", "pp2", "--method", "guess"],
        ["pp4", "pp2", "--devices", "0-x"],
        ["pp4", "pp2", "--devices", "0,0"],
        ["pp4", "pp2", "--lost", "3-1"],
        ["pp4", "pp2", "--model", "gpt3-6.7b", "--layers", "4"],
        ["pp4", "pp2", "--layers", "4"],
        ["pp4", "pp2", "--nodes", "4"],
        ["pp4", "pp2", "--topology", "cluster-a", "--nodes", "4"],
        ["pp4", "pp2", "--staging", "0"],
        ["pp4", "pp2", "--staging", "1XiB"],
        ["pp4", "pp2", "--node-worth", "-1"],
        ["pp4", "pp2", "--node-worth", "many"],
        ["pp4", "pp2", "--node-worth", "0", "--method", "paper"],
        ["pp4", "pp2", "--node-worth", "0", "--method", "migrate-then-defragment"],
        ["pp4", "pp2", "--leave", "3-1"],
        ["pp4", "pp2", "--devices", "0-999999999"],
        ["pp4", "pp2", "--unknown"],
        *(["pp4", "pp2", option, ""] for option in ("--model", "--topology", "--devices", "--lost", "--leave")),
        ["pp4", "pp2", "--prev-devices", ""],
        ["pp4", "pp2", "--devices", "0-2000000,2000000"],
    ],
)
def test_wrong_usage_ends_with_2(shell: Shell, arguments: list[str]) -> None:
    done = shell("plan", *arguments)
    assert (done.code, done.out) == (2, "")


def test_lists_of_devices_are_numbers_and_ranges_in_the_order_given() -> None:
    assert device_list("8-10,3, 5", "--devices") == (8, 9, 10, 3, 5)
    assert device_list(None, "--devices") == ()
    for wrong in ("", "1,,2", "-3", "4-2", "1,0-1", "a", "0-9999999", "٣"):
        with pytest.raises(typer.BadParameter):
            device_list(wrong, "--devices")


def test_sizes_are_bytes_with_or_without_a_unit() -> None:
    sizes = {"1GiB": 2**30, "512 mib": 2**29, "1.5KiB": 1536, "2GB": 2 * 10**9, "1e9": 10**9, "7": 7, "0": 0, "3B": 3}
    assert {text: byte_size(text) for text in sizes} == sizes
    for wrong in ("", "GiB", "1 G", "-1", "1e", "0x10", "1e30", "9223372036854775808", "٣"):
        with pytest.raises(typer.BadParameter):
            byte_size(wrong)


def test_a_device_stages_what_a_session_stages() -> None:
    assert inspect.signature(session).parameters["staging_bytes"].default == STAGING_BYTES


def test_help_says_what_exit_statuses_mean_and_what_sizes_are_left_out(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    text = " ".join(shell("plan", "--help").out.replace("│", " ").split())
    for words in ("3 it cannot be", "1 anything else", "4 x hidden", "as many as --heads", "TP groups together, then"):
        assert words in text


def test_a_plan_is_the_same_for_every_hash_seed_and_needs_no_torch() -> None:
    script = (
        "import sys; from shardshift.cli import main; sys.argv = ['shardshift', 'plan', 'pp4tp2dp2', 'pp2tp4dp3', "
        f"'--devices-per-node', '4', '--json', *{SMALL!r}]; main(); sys.exit('torch' in sys.modules)"
    )
    digests = set()
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        digests.add(json.loads(run.stdout)["digest"])
    assert len(digests) == 1


@pytest.mark.parametrize("columns", ["10", "40"])
def test_a_narrow_terminal_cuts_no_figure_and_no_digest(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    asked = ["plan", "pp8", "pp4", *SMALL, "--devices-per-node", "4"]
    digest = shell(*asked, "--json").json["digest"]
    monkeypatch.setenv("COLUMNS", columns)
    shown = shell(*asked).out
    assert digest in shown
    for line in ((*asked, "pp2"), ("explain", *asked[1:]), ("explain", *asked[1:], "--program", "0")):
        assert "…" not in shell(*line).out
    assert "…" not in shown


# explain


def test_explain_shows_matrices_pairs_and_devices(shell: Shell) -> None:
    asked = ["explain", "pp4tp2", "pp6tp4", "--layers", "24", *SMALL[2:], "--devices-per-node", "4"]
    done = shell(*asked, "--json")
    assert (done.code, done.err) == (0, "")
    assert done.json["paper"]["pp"]["cost"][1] == [2, 2, 4, 4]
    assert len(done.json["pairs"]) == ParallelConfig.parse("pp6tp4").world_size
    text = shell(*asked).out
    for heading in (
        "PP: ",
        "TP: ",
        "Both, merged",
        "Workloads",
        "Exact: MiB that a new rank (row)",
        "Pairs",
        "Devices by",
    ):
        assert heading in text
    assert max(map(len, text.splitlines())) <= 80


def test_explain_prints_the_program_of_a_device(shell: Shell) -> None:
    asked = ["explain", "pp4", "pp2", *SMALL, "--devices-per-node", "2", "--program", "3"]
    done = shell(*asked, "--json")
    assert (done.code, done.err) == (0, "")
    (program,) = done.json["programs"]
    assert program["device"] == 3
    text = shell(*asked).out
    assert text.startswith("device 3: ")
    assert text.index("of sent: forwarded") < text.index("round 0: ") < text.index("send ")
    assert " to device " in text


def test_two_phases_are_two_programs(shell: Shell) -> None:
    asked = ["pp8", "pp4", *SMALL, "--devices-per-node", "4", "--method", "migrate-then-defragment"]
    assert len(shell("explain", *asked, "--program", "0", "--json").json["programs"]) == 2


def test_a_device_that_ends_with_the_first_of_two_phases_has_the_program_of_that(shell: Shell) -> None:
    """Device 3 runs a rank of PREV, gives its state to device 2, and is in neither layout of the second phase."""
    asked = ["explain", "pp4", "pp2", *SMALL, "--method", "migrate-then-defragment", "--program"]
    (program,) = shell(*asked, "3", "--json").json["programs"]
    assert {send["peer"] for step in program["epochs"][0]["rounds"] for send in step if send["do"] == "send"} == {2}
    text = shell(*asked, "3").out
    assert text.startswith("phase 1 of 2\ndevice 3: ")
    assert "phase 2" not in text
    assert "\nphase 2 of 2\ndevice 0: " in shell(*asked, "0").out
    done = shell(*asked, "4")
    assert done.code == 3
    assert "device 4 has no rank before or after" in done.err


def test_a_device_that_takes_no_part_has_no_program(shell: Shell) -> None:
    done = shell("explain", "pp4", "pp2", *SMALL, "--program", "77")
    assert done.code == 3
    assert "device 77 has no rank before or after" in done.err


# bench


def test_bench_lists_the_planner(shell: Shell) -> None:
    done = shell("bench", "list", "--json")
    assert done.code == 0
    assert done.json["planner"].startswith("Planning")
    assert shell("bench", "nothing").code == 3
