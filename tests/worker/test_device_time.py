"""Durations of steps that are launched before the previous step has ended."""

from worker.cuda.async_runner import DeviceTime


def test_consecutive_steps_share_no_time() -> None:
    """
    launched  1     2     3              4
    device    [--1-----][--2--][-3-]     [--4--]
    """
    now = iter([5.0, 8.0, 10.0, 17.0])
    device = DeviceTime(lambda: next(now))
    assert [device.end_step(launched) for launched in (1.0, 3.0, 5.0, 14.0)] == [4.0, 3.0, 2.0, 3.0]


def test_a_step_on_the_host_begins_after_earlier_steps_have_ended() -> None:
    now = iter([5.0, 9.0])
    device = DeviceTime(lambda: next(now))
    device.end_step(1.0)
    began = device.start_of(2.0)
    assert began == 5.0
    assert device.end_step(began) == 4.0
