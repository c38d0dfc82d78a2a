"""The keeper as a real child process: it serves, it reports, and it is never left behind."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierkv import errors
from tierkv.blocks import MoveKind, Outcome, Recovered, Retire
from tierkv.errors import ConfigError, DeadlineError, KeeperError, StoreError
from tierkv.keeper import KeeperClient
from tierkv.pinned import Arena
from tierkv.storage import StorageConfig
from tierkv.testing import make_key

SAVE, LOAD = MoveKind.SAVE, MoveKind.LOAD
DONE, MISSING, CORRUPT = Outcome.DONE, Outcome.MISSING, Outcome.CORRUPT
DECLINED, FAILED = Outcome.DECLINED, Outcome.FAILED


def test_blocks_go_to_the_tier_and_come_back_through_another_process(open_post: Any) -> None:
    post = open_post()
    assert post.run(SAVE, range(8)) == [DONE] * 8
    assert post.run(LOAD, [7, 99, 0], slot=20) == [DONE, MISSING, DONE]
    assert post.holds(20, 7)
    assert post.holds(22, 0)
    assert post.client.is_alive
    assert post.client.pid != os.getpid()


def test_what_was_saved_is_recovered_by_the_next_keeper(open_post: Any, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv"
    first = open_post(url, wait=False)
    assert len(first.open().keys) == 0
    first.submit(SAVE, range(10))
    assert first.client.close(deadline_s=20)
    assert sorted(first.event(object).outcomes.tolist()) == [DONE] * 10, "close lets saves end"
    second = open_post(url, wait=False)
    recovered = second.open()
    assert sorted(recovered.keys) == sorted(make_key(n, n % 2) for n in range(10))
    assert second.run(LOAD, [3]) == [DONE]
    assert second.holds(0, 3)


def test_the_keeper_starts_without_torch(open_post: Any) -> None:
    post = open_post()
    assert "torch" not in Path(f"/proc/{post.client.pid}/maps").read_text()


def test_retirement_and_rotation_cross_the_wire(open_post: Any) -> None:
    post = open_post("memory://?capacity=10000")
    assert post.run(SAVE, [0, 2]) == [DONE, DONE]
    waiting = post.submit(SAVE, [4])
    retire = post.event(Retire)
    post.client.agree(retire.retire_id)
    assert post.done(waiting) == [DONE]
    post.client.rotate(1)
    recovered = post.event(Recovered)
    assert (len(recovered.keys), recovered.epoch) == (0, 1)
    assert post.run(SAVE, [0]) == [DECLINED]
    post.epoch = 1
    assert post.run(LOAD, [4]) == [MISSING]


@pytest.mark.parametrize(
    ("url", "kind", "says"),
    [
        ("nonsense", ConfigError, "has no scheme"),
        ("memoy://", errors.BackendNotFoundError, "did you mean 'memory'"),
        ("memory://?capacty=1", ConfigError, "did you mean 'capacity'"),
        ("file:///proc/nothing", errors.StoreUnusableError, "/proc/nothing"),
    ],
)
def test_what_is_wrong_at_open_is_raised_here_as_the_same_class_in_one_line(
    open_post: Any, url: str, kind: type[Exception], says: str
) -> None:
    post = open_post(url, wait=False)
    with pytest.raises(kind, match=says) as caught:
        post.open()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_a_directory_that_another_keeper_owns_is_busy(open_post: Any, tmp_path: Path) -> None:
    url = f"nvme://{tmp_path}/kv?capacity=64MiB&segment=4MiB"
    open_post(url)
    with pytest.raises(errors.StoreBusyError):
        open_post(url)


def test_a_keeper_that_ends_during_open_says_how(open_post: Any, sluggish: None) -> None:
    post = open_post("sluggish://?open=exit", wait=False)
    with pytest.raises(KeeperError, match="exit status 7"):
        post.open()
    assert isinstance(KeeperError("x"), StoreError)


def test_an_open_that_hangs_ends_at_the_deadline_and_the_process_too(
    open_post: Any, sluggish: None, gone: Callable[[int], bool]
) -> None:
    post = open_post("sluggish://?open=hang", wait=False)
    with pytest.raises(DeadlineError, match=r"not open after 0\.5 s"):
        post.client.wait_open(0.5)
    assert gone(post.client.pid)
    assert post.run(SAVE, [1]) == [DECLINED]


def test_an_arena_of_another_size_than_promised_is_refused(config: StorageConfig) -> None:
    with Arena.create(4096) as arena:
        client = KeeperClient(dataclasses.replace(config, arena_bytes=8192), arena)
        with pytest.raises(errors.StoreUnusableError, match="holds 4096 bytes where 8192"):
            client.wait_open(30)


def test_log_lines_of_the_keeper_come_out_here(
    open_post: Any, sluggish: None, caplog: pytest.LogCaptureFixture
) -> None:
    post = open_post("sluggish://?read=flip")
    post.run(SAVE, [2])
    assert post.run(LOAD, [2], slot=8) == [CORRUPT]
    post.until(lambda: bool(caplog.records))
    assert [r.name for r in caplog.records] == ["tierkv.tier"]
    assert caplog.records[0].levelno == logging.WARNING
    line = caplog.records[0].getMessage()
    assert line.startswith(f"keeper {post.client.pid}: tier sluggish: block 0:")
    post.until(lambda: post.client.stats().get("corrupt_load_blocks") == 1)


def test_ctrl_c_does_not_end_the_keeper_before_its_client(open_post: Any) -> None:
    post = open_post()
    os.kill(post.client.pid, signal.SIGINT)
    assert post.run(SAVE, [1]) == [DONE]
    assert post.client.stats()["keeper_deaths"] == 0


def test_stats_are_json_and_follow_what_happened(open_post: Any) -> None:
    post = open_post()
    post.run(SAVE, range(4))
    post.until(lambda: post.client.stats().get("tier_blocks") == 4)
    stats = json.loads(json.dumps(post.client.stats()))
    assert stats["done_save_blocks"] == 4
    assert stats["save_bytes"] == 2 * (5000 + 12288)
    assert stats["keeper_alive"] == 1


def test_without_a_tier_the_keeper_answers_as_if_nothing_were_there(open_post: Any) -> None:
    post = open_post("")
    assert post.run(SAVE, [1]) == [DECLINED]
    assert post.run(LOAD, [1]) == [MISSING]


@pytest.mark.parametrize(
    ("thread", "stopped"),
    [
        (False, False),
        (False, True),  # its loop sees nothing: the kernel must end it
        (True, False),  # the kernel does not watch a thread: the socket must do
    ],
)
def test_a_keeper_dies_with_its_parent(
    thread: bool, stopped: bool, gone: Callable[[int], bool]
) -> None:
    script = f"""
import signal, threading
from tierkv.keeper import KeeperClient
from tierkv.pinned import Arena
from tierkv.storage import StorageConfig
config = StorageConfig(
    url="memory://", namespace=bytes(32), namespace_text="", arena_bytes=4096, block_bytes=(1,)
)
made = []
def start():
    made.append(KeeperClient(config, Arena.create(4096)))
    made[0].wait_open(30)
if {thread}:
    worker = threading.Thread(target=start)
    worker.start()
    worker.join()
else:
    start()
print(made[0].pid, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        keeper = int(parent.stdout.readline())
        os.kill(keeper, 0)  # it outlived the thread that started it
        if stopped:
            os.kill(keeper, signal.SIGSTOP)
        parent.kill()
    assert gone(keeper)


def test_a_keeper_started_by_a_thread_outlives_it(open_post: Any) -> None:
    posts: list[Any] = []
    thread = threading.Thread(target=lambda: posts.append(open_post()))
    thread.start()
    thread.join()
    assert posts[0].run(SAVE, [1]) == [DONE]


def test_closing_twice_and_as_a_context_manager(open_post: Any) -> None:
    post = open_post()
    with post.client as client:
        assert isinstance(client, KeeperClient)
    assert client.close()
    assert not client.is_alive
    assert post.run(SAVE, [1]) == [DECLINED]


def test_close_of_a_keeper_that_hangs_kills_it(
    open_post: Any, sluggish: None, gone: Callable[[int], bool]
) -> None:
    post = open_post("sluggish://?write=hang")
    saving = post.submit(SAVE, [1])
    os.kill(post.client.pid, signal.SIGSTOP)
    assert not post.client.close(deadline_s=0)
    assert gone(post.client.pid)
    assert post.done(saving) == [FAILED]
