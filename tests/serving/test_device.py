"""The device thread: what comes back from it, and who no longer waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from outrider.serving.device import DeviceStuck, DeviceThread


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    """A thread that is closed behind the test."""
    device = DeviceThread("test-device")
    yield device
    device.close()


async def test_calls_run_on_one_thread_in_order(device: DeviceThread) -> None:
    """Results come back to their callers; the event loop's thread runs none of the calls."""
    order: list[int] = []

    def call(number: int) -> tuple[int, str]:
        order.append(number)
        return number, threading.current_thread().name

    found = await asyncio.gather(*(device.run(lambda n=n: call(n)) for n in range(5)))
    assert found == [(n, "test-device") for n in range(5)]
    assert order == [0, 1, 2, 3, 4]


async def test_an_error_is_its_callers(device: DeviceThread) -> None:
    """What a call raises comes back, a TimeoutError of its own too; the next one runs."""
    for error in (ValueError("bad"), TimeoutError("its own")):

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error), match=str(error)):
            await device.run(fail)
    assert await device.run(lambda: 3) == 3


async def test_who_leaves_stops_nothing(device: DeviceThread) -> None:
    """A cancelled caller's running call goes on, one that has not begun never does."""
    begun, go_on = threading.Event(), threading.Event()
    ran: list[str] = []

    def first() -> None:
        begun.set()
        go_on.wait(10)
        ran.append("first")

    running = asyncio.ensure_future(device.run(first))
    waiting = asyncio.ensure_future(device.run(lambda: ran.append("waiting")))
    while not begun.is_set():
        await asyncio.sleep(0)
    for task in (running, waiting):
        task.cancel()
    await asyncio.wait({running, waiting})
    go_on.set()
    assert await device.run(lambda: "last") == "last"
    assert ran == ["first"]


async def test_a_call_that_never_returns_is_given_up(device: DeviceThread) -> None:
    """Its caller is told, and whoever comes behind it; closing does not wait for it."""
    release = threading.Event()
    device.call_timeout_s = 0.01
    for _ in range(2):
        with pytest.raises(DeviceStuck, match=r"0\.01 s"):
            await device.run(lambda: release.wait(10))
    device.close()
    release.set()


async def test_closing_cancels_what_waits(device: DeviceThread) -> None:
    """The running call ends first and is answered; one that waited for its turn never runs."""
    begun, go_on = threading.Event(), threading.Event()

    def first() -> str:
        begun.set()
        go_on.wait(10)
        return "done"

    running = asyncio.ensure_future(device.run(first))
    waiting = asyncio.ensure_future(device.run(lambda: "never"))
    while not begun.is_set():
        await asyncio.sleep(0)
    threading.Timer(0.01, go_on.set).start()
    device.close()
    assert await running == "done"
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_an_answer_behind_the_loops_end_is_dropped(device: DeviceThread) -> None:
    """A call that ends when its event loop is gone ends quietly, and so does the thread."""
    go_on = threading.Event()

    async def leave() -> None:
        asyncio.ensure_future(device.run(lambda: go_on.wait(10)))
        await asyncio.sleep(0)

    asyncio.run(leave())
    go_on.set()
    assert asyncio.run(device.run(lambda: "alive")) == "alive"
