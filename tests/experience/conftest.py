import pytest

from hotpot.testing.object_server import object_server as running


@pytest.fixture(scope="session")
def object_server():
    """One SeaweedFS for the session; whoever hangs or kills it brings it back."""
    with running() as server:
        yield server


@pytest.fixture
def s3(object_server, monkeypatch):
    """Its address in the environment, and the settings of a store that uses it, with short deadlines."""
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    return {
        "endpoint": object_server.endpoint,
        "allow_http": True,
        "connect_timeout_s": 1.0,
        "request_timeout_s": 2.0,
        "retries": 1,
    }
