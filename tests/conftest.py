"""What tests of several packages share: a real pretrained model, and how property tests run on any machine."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from hotpot.testing.pretrained import smollm2_folder

CACHE = Path(__file__).parents[1] / "runs" / "models"

# No property test fails because a machine is slow or busy: pytest-timeout ends what hangs.
settings.register_profile(
    "any machine", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a model folder, imported once and kept; a test that takes it is slow, and fails where the
    extra ``smollm2`` is missing."""
    return smollm2_folder(CACHE)
