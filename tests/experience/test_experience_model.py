"""The store against a model: any sequence of operations, with the process killed at any named place in between."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from hotpot.testing.tracked import TrackedRun

PLACES = [
    "wal_written", "before_ledger", "after_ledger", "ledger_before_commit", "ledger_after_commit", "log_segment_made",
    "log_segment_sealed", "log_segment_deleted", "lake_before_steps", "lake_after_steps", "lake_before_trajectories",
    "lake_after_trajectories", "lake_after_attempts", "lake_after_consumptions", "before_watermark",
    "lake_before_segments", "lake_after_segments", "after_watermark", "recovered_log",
]  # fmt: skip


class StoreMachine(RuleBasedStateMachine):
    """Every rule is one operation; a kill may come with any of them, and the next rule takes the run over."""

    def __init__(self):
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="hotpot-model-"))
        self.run = TrackedRun(self.home / "run")
        self.run.start()

    def teardown(self):
        try:
            self.run.kill()
            assert self.run.start()
            assert self.run.close()
            assert not self.run.check(at_rest=True)
        finally:
            self.run.kill()
            shutil.rmtree(self.home)

    def living(self):
        """A rule never depends on when the process died (an armed place in another thread decides that): it takes over."""
        while not self.run.alive:
            assert not self.run.check(at_rest=False)
            self.run.start()
        return self.run

    @rule(place=st.sampled_from(PLACES), count=st.integers(1, 4))
    def take_over_and_die_on_the_way(self, place, count):
        self.living().kill()
        self.run.start(crash_at=(place, count))

    @rule(place=st.sampled_from(PLACES), count=st.integers(1, 6))
    def arm(self, place, count):
        self.living().arm(place, count)

    @rule()
    def kill(self):
        self.living().kill()

    @rule(size=st.integers(1, 6))
    def lease(self, size):
        self.living().lease(size)

    @rule(most=st.integers(1, 6), broken=st.integers(0, 6))
    def append(self, most, broken):
        run = self.living()
        if count := min(most, run.can_append):
            run.append(count, broken=min(broken, count))

    @rule(state=st.sampled_from(["failed", "dropped"]))
    def end(self, state):
        if self.living().can_append:
            self.run.end(state)

    @rule(count=st.integers(0, 5))
    def learn(self, count):
        self.living().learn(count)

    @rule()
    def note(self):
        self.living().note()

    @rule()
    def flush(self):
        self.living().flush()

    @rule()
    def look(self):
        assert not self.run.check(at_rest=False)


def test_a_few_histories():
    StoreMachine.TestCase.settings = settings(
        max_examples=3, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck)
    )
    StoreMachine.TestCase().runTest()


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_many_histories():
    StoreMachine.TestCase.settings = settings(
        max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    StoreMachine.TestCase().runTest()
