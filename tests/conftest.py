"""What tests of several packages share: a real pretrained model."""

from pathlib import Path

import pytest

from hotpot.testing.pretrained import smollm2_folder

CACHE = Path(__file__).parents[1] / "runs" / "models"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a model folder, imported once and kept; a test that takes it is slow, and fails where the
    extra ``smollm2`` is missing."""
    return smollm2_folder(CACHE)
