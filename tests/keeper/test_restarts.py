"""A keeper that dies or hangs costs hits: moves in flight end, a new one opens, nothing leaks."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tierkv.blocks import MoveDone, MoveKind, MoveReleased, Outcome, Recovered, Retire, TierDown
from tierkv.keeper.process import KeeperProcess
from tierkv.testing import make_key

SAVE, LOAD, DELETE = MoveKind.SAVE, MoveKind.LOAD, MoveKind.DELETE
DONE, MISSING, FAILED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED
DECLINED, TIMED_OUT = Outcome.DECLINED, Outcome.TIMED_OUT


def reaped(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_moves_in_flight_of_a_killed_keeper_fail_and_the_next_one_serves(
    open_post: Any, sluggish: None, caplog: pytest.LogCaptureFixture
) -> None:
    post = open_post("sluggish://?read=hang")
    first = post.client.pid
    loading = post.submit(LOAD, [1, 2], from_tier=[True, False])
    saving = post.submit(SAVE, [3], slot=8)
    assert post.done(saving) == [DONE]
    os.kill(first, signal.SIGKILL)
    done = post.event(MoveDone)
    assert done.move_id == loading
    assert done.outcomes.tolist() == [FAILED, DONE]
    assert done.released
    assert reaped(first), "slots are free only once the process is gone"
    assert "exit status -9" in post.event(TierDown).reason
    assert len(post.event(Recovered).keys) == 0
    assert post.client.pid != first
    assert post.run(SAVE, [1]) == [DONE]
    stats = post.client.stats()
    assert (stats["keeper_deaths"], stats["keeper_hangs"], stats["keeper_restarts"]) == (1, 0, 1)
    assert len(caplog.records) == 1
    assert f"keeper {first}" in caplog.records[0].getMessage()


def test_a_killed_keeper_comes_back_with_what_it_held(open_post: Any, tmp_path: Path) -> None:
    post = open_post(f"file://{tmp_path}/kv")
    post.run(SAVE, range(6))
    os.kill(post.client.pid, signal.SIGKILL)
    post.event(TierDown)
    recovered = post.event(Recovered)
    assert sorted(recovered.keys) == sorted(make_key(n, n % 2) for n in range(6))
    assert post.run(LOAD, range(6), slot=10) == [DONE] * 6


@pytest.mark.parametrize("how", ["stopped", "loop blocked"])
def test_a_keeper_that_hangs_is_ended_and_started_anew(
    open_post: Any, sluggish: None, how: str, tmp_path: Path
) -> None:
    flag = tmp_path / "misbehave"
    post = open_post(f"sluggish://?read=block&flag={flag}", hang_timeout_s=1.0)
    first = post.client.pid
    post.run(SAVE, [1])
    if how == "stopped":
        os.kill(first, signal.SIGSTOP)
    else:
        flag.touch()
    loading = post.submit(LOAD, [1], slot=8)
    assert "did not answer for 1 s" in post.event(TierDown).reason
    assert post.done(loading) == [FAILED]
    assert reaped(first)
    flag.unlink(missing_ok=True)
    post.event(Recovered)
    assert post.run(SAVE, [1]) == [DONE]
    assert post.client.stats()["keeper_hangs"] == 1


def test_a_hung_backend_is_not_a_hung_keeper(open_post: Any, sluggish: None) -> None:
    post = open_post("sluggish://?read=hang", read_timeout_s=2.0, hang_timeout_s=1.0)
    loading = post.submit(LOAD, [1])
    done = post.event(MoveDone)
    assert done.outcomes.tolist() == [TIMED_OUT]
    assert not done.released
    assert post.run(SAVE, [2], slot=8) == [DONE]
    assert post.client.stats()["keeper_deaths"] == 0
    os.kill(post.client.pid, signal.SIGKILL)
    assert post.event(MoveReleased).move_id == loading, "the keeper's end releases its slots"


def test_a_process_that_the_kernel_holds_keeps_its_slots_but_not_its_callers(
    open_post: Any, sluggish: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [True]
    really = KeeperProcess.reaped
    monkeypatch.setattr("tierkv.keeper.client.REAP_GRACE_S", 0.0)
    monkeypatch.setattr(KeeperProcess, "reaped", lambda self: not held[0] and really(self))
    post = open_post("sluggish://?read=hang")
    loading = post.submit(LOAD, [1])
    os.kill(post.client.pid, signal.SIGKILL)
    done = post.event(MoveDone)
    assert done.outcomes.tolist() == [FAILED]
    assert not done.released
    post.event(TierDown)
    assert post.client.poll() == []
    held[0] = False
    assert post.event(MoveReleased).move_id == loading
    post.event(Recovered)


def test_five_restarts_leave_no_process_and_no_descriptor(open_post: Any) -> None:
    post = open_post()
    post.run(SAVE, [1])
    before = len(os.listdir("/proc/self/fd"))
    pids = []
    for _ in range(5):
        pids.append(post.client.pid)
        os.kill(post.client.pid, signal.SIGKILL)
        post.event(TierDown)
        post.event(Recovered)
        assert post.run(SAVE, [1]) == [DONE]
    assert len(set(pids)) == 5
    assert all(reaped(pid) for pid in pids)
    assert len(os.listdir("/proc/self/fd")) == before


def test_while_it_is_down_moves_end_at_once(open_post: Any) -> None:
    post = open_post()
    os.kill(post.client.pid, signal.SIGKILL)
    post.event(TierDown)
    assert not post.client.is_alive
    assert post.run(SAVE, [1]) == [DECLINED]
    assert post.run(LOAD, [1, 2], from_tier=[False, True]) == [DONE, FAILED]
    post.event(Recovered)


def test_restarts_are_bounded_when_nothing_ever_works(
    open_post: Any,
    sluggish: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("tierkv.keeper.client.MAX_RESTARTS", 2)
    monkeypatch.setattr("tierkv.keeper.client.RESTART_WAIT_S", 0.0)
    flag = tmp_path / "misbehave"
    post = open_post(f"sluggish://?open=exit&flag={flag}")
    flag.touch()
    os.kill(post.client.pid, signal.SIGKILL)
    post.until(lambda: any("stays down" in r.getMessage() for r in caplog.records))
    assert post.client.stats()["keeper_deaths"] == 3
    assert post.client.stats()["keeper_restarts"] == 2
    assert len([e for e in post.events if isinstance(e, TierDown)]) == 3
    assert post.run(SAVE, [1]) == [DECLINED]
    assert post.client.poll() == []


def test_a_rotation_that_a_dead_keeper_did_not_finish_is_finished_by_the_next(
    open_post: Any, tmp_path: Path
) -> None:
    post = open_post(f"file://{tmp_path}/kv")
    post.run(SAVE, range(6))
    os.kill(post.client.pid, signal.SIGSTOP)
    post.client.rotate(1)
    os.kill(post.client.pid, signal.SIGKILL)
    post.event(TierDown)
    recovered = post.event(Recovered)
    assert (len(recovered.keys), recovered.epoch) == (0, 1)
    post.epoch = 1
    assert post.run(LOAD, range(6)) == [MISSING] * 6


def test_a_rotation_that_a_hung_backend_holds_up_is_finished_by_the_next_keeper(
    open_post: Any, sluggish: None
) -> None:
    post = open_post("sluggish://?write=hang", write_timeout_s=0.1, hang_timeout_s=1.0)
    assert post.run(SAVE, [1]) == [TIMED_OUT]
    post.client.rotate(1)
    assert "did not finish a rotation" in post.event(TierDown).reason
    assert post.event(Recovered).epoch == 1
    assert len([e for e in post.events if isinstance(e, MoveReleased)]) == 1


def test_an_answer_to_a_dead_keepers_retire_means_nothing_to_the_next(open_post: Any) -> None:
    post = open_post("memory://?capacity=10000")

    def asks() -> int:
        assert post.run(SAVE, [0, 2]) == [DONE, DONE]
        post.submit(SAVE, [4])
        return int(post.event(Retire).retire_id)

    old = asks()
    os.kill(post.client.pid, signal.SIGKILL)
    post.event(Recovered)
    new = asks()
    assert new != old
    post.client.agree(old)
    assert post.run(LOAD, [0], slot=8) == [DONE]
    post.client.agree(new)
    post.event(MoveDone, lambda e: e.outcomes.tolist() == [DONE])


async def woken(post: Any, kind: type, awake: asyncio.Event) -> Any:
    """Wait for an event on the loop alone: poll only when woken."""
    while True:
        post.events += post.client.poll()
        for event in post.events:
            if isinstance(event, kind):
                post.events.remove(event)
                return event
        awake.clear()
        await asyncio.wait_for(awake.wait(), 30)


@pytest.mark.every_loop
async def test_on_a_loop_events_wake_the_caller_deaths_and_hangs_included(
    open_post: Any, sluggish: None, tmp_path: Path
) -> None:
    flag = tmp_path / "misbehave"
    post = open_post(f"sluggish://?read=block&flag={flag}", hang_timeout_s=1.0)
    awake = asyncio.Event()
    post.client.on_event(awake.set)
    post.submit(SAVE, [1])
    assert (await woken(post, MoveDone, awake)).outcomes.tolist() == [DONE]

    os.kill(post.client.pid, signal.SIGKILL)
    await woken(post, TierDown, awake)
    post.submit(SAVE, [1])
    assert (await woken(post, MoveDone, awake)).outcomes.tolist() == [DECLINED]
    await woken(post, Recovered, awake)

    os.kill(post.client.pid, signal.SIGSTOP)
    post.submit(LOAD, [1])
    await woken(post, TierDown, awake)
    assert (await woken(post, MoveDone, awake)).outcomes.tolist() == [FAILED]
    await woken(post, Recovered, awake)
    post.client.on_event(None)
