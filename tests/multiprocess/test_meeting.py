"""Opening a context over several processes: they agree, or every one of them says why not."""

from __future__ import annotations

import signal

import pytest

pytestmark = pytest.mark.multiprocess

PROGRAM = "tests.multiprocess._meetings"

SECONDS = 20  # in which a meeting of processes that have all come is over, on any machine


@pytest.fixture(scope="module")
def met(start_for_module):
    return start_for_module(f"{PROGRAM}:meetings", processes=2, devices=2).wait(90)


def test_every_group_over_several_processes_gets_a_transport(met):
    for results in met:
        assert results["groups"] == [[2], [2, 2], [None, None]]


def test_a_process_is_described_by_its_ranks_and_devices(met):
    for results in met:
        assert results["who"] == [
            "process 0 (ranks 0, 1; devices 0, 1)",
            "process 1 (ranks 2, 3; devices 2048, 2049)",
        ]
        assert results["who across"] == "process 1 (rank 1 of group 0; rank 1 of group 1; devices 2048, 2049)"


def test_devices_of_a_node_are_compared_with_the_processes(met):
    for results in met:
        two, four, one = results["nodes"]
        assert two["type"] is None
        assert four["type"] is None
        assert one["text"] == (
            "async_emb num_devices_per_node=1 puts devices of process 0 on two nodes, but a process runs on one"
        )


def test_a_process_without_a_device_of_the_mesh_is_told_so(met):
    assert met[0]["not mine"]["type"] is None
    assert met[1]["not mine"]["type"] == "ContextError"
    assert (
        "'not mine': no device of the mesh belongs to this process, 1: the mesh is over the devices of process 0"
        in met[1]["not mine"]["text"]
    )


def test_an_array_over_several_processes_can_be_printed_and_fetched(met):
    for results in met:
        printed, total = results["printed"]
        assert "shape=(4, 4)" in printed
        assert total == 16


@pytest.mark.parametrize(
    ("case", "field", "values"),
    [
        ("num_unique", "num_unique", ("8", "9")),
        ("tokens_per_rank", "tokens_per_rank", ("4", "8")),
        ("dtype", "dtype", ("'float32'", "'bfloat16'")),
        ("version", "async_emb", ("'1.0'", "'1.1'")),
        ("timeout", "ASYNC_EMB_TIMEOUT_SECONDS", ("50.0", "51.0")),
    ],
)
def test_a_difference_is_named_in_every_process(met, case, field, values):
    for results in met:
        assert results[case]["type"] == "ContextError"
        assert results[case]["seconds"] < SECONDS
        assert results[case]["text"] == (
            f"async_emb context 'differs': {field} differs between processes: "
            f"{values[0]} in process 0 (ranks 0, 1; devices 0, 1), "
            f"{values[1]} in process 1 (ranks 2, 3; devices 2048, 2049)"
        )


def test_all_differences_are_listed(met):
    for results in met:
        assert [problem.split(": ")[1].split()[0] for problem in results["many"]["problems"]] == [
            "num_unique",
            "padding_id",
        ]


def test_the_next_meeting_under_the_same_name_works(met):
    for results in met:
        assert results["same again"] == [2]


def test_processes_that_have_tried_before_meet_those_that_have_not(met):
    for alone in met[1]["alone"]:
        assert "within 0.4 s process 0 (ranks 0, 1; devices 0, 1) did not come" in alone["text"]
        assert alone["notes"][0] == "Seen: process 1 (ranks 2, 3; devices 2048, 2049)"
    for results in met:
        assert results["after"] == [2]


def test_meetings_leave_no_open_files_and_no_notes(met):
    for results in met:
        assert results["files"][-1] <= results["files"][1], results["files"]
        assert results["left"] == {}


def test_who_is_missing_dead_or_elsewhere_is_named_and_survivors_go_on(start):
    first, second, _ = start(f"{PROGRAM}:three_meet", processes=3).wait(90, may_die=[2])
    for results in (first, second):
        assert results["all"] == [3]
        assert "within 1.5 s process 2 (rank 2; device 4096) did not come" in results["missing"]["text"]
        assert results["missing"]["notes"][0] == "Seen: process 0 (rank 0; device 0), process 1 (rank 1; device 2048)"
        assert "within 2.5 s process 2 (rank 2; device 4096) came, but did not answer" in results["dead"]["text"]
        assert results["survivors"] == [2]
    assert (
        "its mesh is over processes [0, 1] in process 0, but over processes [0, 1, 2] in process 1"
        in (first["meshes"]["text"])
    )
    assert (
        "its mesh is over processes [0, 1, 2] in process 1, but over processes [0, 1] in process 0"
        in (second["meshes"]["text"])
    )
    for results in (first, second):
        assert results["meshes"]["seconds"] < SECONDS


def test_a_context_opens_again_with_a_process_that_took_a_place(start):
    job = start(f"{PROGRAM}:replaced", processes=2)
    job.wait_for_file("ready 0")
    job.wait_for_file("ready 1")
    job.signal(1, signal.SIGKILL)
    newcomer = start(f"{PROGRAM}:replaced", processes=1, first=1, size=2, port=job.port, newcomer=True)
    failed, again = job.wait(may_die=[1])[0]
    assert (failed["kind"], failed["peers"]) == ("lost", [1])
    assert again == [2]
    assert newcomer.wait() == [[2]]
