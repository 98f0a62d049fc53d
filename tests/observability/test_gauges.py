import mmap
import threading

import pytest

from hotpot.errors import UsageError
from hotpot.metrics import gauge_names
from hotpot.observability.gauges import ProcessGauges, gauge_rows, num_threads, resident_bytes


class Clock:
    def __init__(self) -> None:
        self.now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def sample(gauges: ProcessGauges, **more: float) -> dict[str, float]:
    rows = gauges.sample(update=3, policy_version=7, env_version="env@1+a", **more)
    assert all(
        (row.run_id, row.update, row.policy_version, row.env_version) == ("r", 3, 7, "env@1+a")
        for row in rows
    )
    assert {row.name for row in rows} <= gauge_names()
    return {row.name: row.value for row in rows}


def test_idle_share_is_over_the_time_since_the_sample_before() -> None:
    wall, cpu = Clock(), Clock()
    gauges = ProcessGauges("r", num_processors=2, wall_s=wall, cpu_s=cpu)
    wall.now_s, cpu.now_s = 20.0, 15.0
    assert sample(gauges)["system/processor_idle_share"] == pytest.approx(0.75)
    wall.now_s, cpu.now_s = 21.0, 17.0
    assert sample(gauges)["system/processor_idle_share"] == 0.0
    assert "system/processor_idle_share" not in sample(gauges)


def test_only_what_is_handed_in_is_recorded() -> None:
    found = sample(ProcessGauges("r"), engine_queue_depth=4, gpu_utilisation=0.5)
    assert found["system/engine_queue_depth"] == 4.0
    assert found["system/gpu_utilisation"] == 0.5
    assert not {"system/gpu_memory_bytes", "system/experience_backlog"} & set(found)


def test_memory_and_threads_are_those_of_the_process() -> None:
    before = resident_bytes()
    # Of the kernel itself: an allocator may have as much left over from before.
    with mmap.mmap(-1, 50_000_000) as block:
        block[::4096] = b"x" * len(range(0, len(block), 4096))
        assert resident_bytes() - before > 40_000_000
    wait = threading.Event()
    counted = num_threads()
    assert counted is not None
    thread = threading.Thread(target=wait.wait)
    thread.start()
    assert num_threads() == counted + 1
    wait.set()
    thread.join()


def test_an_unregistered_gauge_is_refused() -> None:
    with pytest.raises(UsageError, match="system/mood"):
        gauge_rows({"system/mood": 1.0}, run_id="r", update=0, policy_version=0, env_version="")
