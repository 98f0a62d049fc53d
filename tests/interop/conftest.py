from pathlib import Path

import pytest
from interop_run import RUN_ID, Written, write


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(Path(tmp_path_factory.mktemp("interop")) / "runs" / RUN_ID)
