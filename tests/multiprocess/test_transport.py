"""Bytes between processes, and what is said when one of them fails."""

from __future__ import annotations

import signal

import pytest

pytestmark = pytest.mark.multiprocess

PROGRAM = "tests.multiprocess._transports"


@pytest.mark.parametrize("processes", [2, 4])
def test_blocks_arrive_equal_unequal_and_empty(start, processes):
    job = start(f"{PROGRAM}:exchanges", processes=processes)
    assert job.wait() == [[number, processes] for number in range(processes)]


def test_a_timeout_names_all_who_are_late_and_nobody_else(start):
    results = start(f"{PROGRAM}:late_peers", processes=4).wait()
    for number in (0, 1):
        waited, again = results[number]
        assert (waited["kind"], waited["peers"]) == ("timeout", [2, 3])
        assert f"of peer {number} of 4: no answer from peers 2, 3 within 1 s" in waited["text"]
        assert again["text"] == waited["text"]  # the same at once, not another second later
        assert again["seconds"] < waited["seconds"] / 2


def test_blocks_of_sizes_that_nobody_awaits_count_as_late_and_harm_nothing(start):
    """Where processes have come to different points of their programs."""
    results = start(f"{PROGRAM}:other_sizes", processes=2).wait()
    for number, result in enumerate(results):
        assert result["peers"] == [1 - number]
    # The first one to give up goes, and the other may find it gone before its own time is over.
    assert "timeout" in {result["kind"] for result in results} <= {"timeout", "lost"}


def test_end_wakes_an_exchange_and_its_reason_reaches_the_others(start):
    ender, other, late = start(f"{PROGRAM}:ends", processes=3).wait()
    announced, waited, later = ender
    assert waited["kind"] == later["kind"] == "ended"
    # Closing its connections is how the others learn of it, before their time is over.
    assert other[1]["kind"] == late[1]["kind"] == "lost"
    assert 0 in late[1]["peers"]
    # What was announced first stands.
    assert announced == other[0] == late[0] == "nothing works"


def test_a_killed_peer_is_named_as_lost(start):
    job = start(f"{PROGRAM}:killed_peer", processes=3)
    job.wait_for_file("ready")
    job.signal(2, signal.SIGKILL)
    results = job.wait(30, may_die=[2])
    for result in results[:2]:
        # The other survivor may have gone away for the same reason, a moment before.
        assert result["kind"] == "lost"
        assert 2 in result["peers"] or result["peers"] in ([0], [1])
    assert any(2 in result["peers"] for result in results[:2])


def test_a_buffer_of_a_failed_exchange_is_not_written_any_more(start):
    failed, untouched, arrived = start(f"{PROGRAM}:stopped_peer", processes=2).wait()[0]
    assert (failed["kind"], failed["peers"]) == ("timeout", [1])
    assert 0 < arrived < 1
    assert untouched


def test_transports_leave_no_open_files(start):
    for counts in start(f"{PROGRAM}:files_of_transports", processes=2).wait():
        assert counts[-1] <= counts[1], counts


def test_every_failure_to_connect_says_what_to_do(start):
    (results,) = start(f"{PROGRAM}:connect_errors", processes=1).wait()
    assert results["one"] == [1, True]
    expected = {
        "taken": "Another program has the port: choose a free one",
        "alone": "process 0 of 2 could not connect to the others",
        "unreachable": "the store at 127.0.0.1:1 could not be reached within 1.5 s",
        "interface": "names 'nosuch0', which is no network interface of this machine: choose of lo",
        "address": "'nowhere' is not an address: give it as 'host:port'",
    }
    for name, text in expected.items():
        assert results[name]["type"] == "ProcessGroupError", results[name]
        assert text in results[name]["text"]
        assert "\n" not in results[name]["text"]


def test_nobody_waits_for_a_store_that_is_stopped(start):
    job = start(f"{PROGRAM}:stopped_store", processes=2)
    job.wait_for_file("ready 0")
    job.wait_for_file("ready 1")
    job.signal(0, signal.SIGSTOP)
    (job.directory / "stopped").touch()
    job.wait_for_file("told")
    job.signal(0, signal.SIGCONT)
    heard, _ = job.wait()[1]
    assert heard is None
