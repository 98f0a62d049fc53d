"""A run is killed and resumed; the version that sampled each recorded token is read from its log-probability alone."""

import signal
from pathlib import Path

import pytest
from test_topology_kill import UPDATES, Operator
from topology_toy_worker import toy_model

from hotpot.experience import open_run
from hotpot.models import checksum, load_decoder
from hotpot.testing.toy_weights import ROUNDING, number_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOY = ("learner.learning_rate=0", "run.self_test=false", "evaluation.every_updates=0")
WORKER = Path(__file__).with_name("topology_toy_worker.py")
STEPS = "select trajectory_id, step, sampled_tokens, model_logprobs, policy_version, policy_checksum, span_policy_version, span_policy_length, reused_tokens, context_tokens from steps"


@pytest.mark.parametrize("places", [("collecting:3", "published:2"), ("recording:2", "collecting:5")])
def test_killed_and_resumed_each_token_tells_its_version(
    tmp_path: Path, model: Path, places: tuple[str, str]
) -> None:
    operator = Operator(folder=tmp_path, model=model, worker=WORKER)
    code, text = operator.start(f"{places[0]}:9", *TOY)
    assert code == -signal.SIGKILL, text
    code, text = operator.resume(f"{places[1]}:9")
    assert code == -signal.SIGKILL, text
    code, text = operator.resume()
    assert code == 0, text
    reader = open_run(operator.run)
    toy = toy_model(model, load_decoder(model).config.vocab_size, 128)
    rows = reader.sql(STEPS).to_pylist()
    for row in rows:
        at = 0
        for version, length in zip(row["span_policy_version"], row["span_policy_length"], strict=True):
            for place in range(at, at + length):
                token, logprob = row["sampled_tokens"][place], row["model_logprobs"][place]
                assert toy.number(token, logprob) == number_of(version), (
                    row["trajectory_id"],
                    row["step"],
                    place,
                )
                assert abs(logprob - toy.logprob(token, number_of(version))) <= ROUNDING
            at += length
        assert at == len(row["sampled_tokens"])
        assert row["policy_checksum"] == checksum(toy.weights(number_of(row["policy_version"])))
    versions = {version for row in rows for version in row["span_policy_version"]}
    assert len(versions) > UPDATES, "each update and each resume serves a version of its own"
    assert sum(row["reused_tokens"] for row in rows) > 0
    assert sum(len(row["sampled_tokens"]) for row in rows) > 500
