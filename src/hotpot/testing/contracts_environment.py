"""The contract of an environment as functions that a plug-in author calls from a test of their own.

::

    def test_contract() -> None:
        environment_contract(bind(SPEC))

Each raises AssertionError listing what breaks the contract. They are thin over :mod:`hotpot.envs.check`, which
``hotpot env check`` runs too.
"""

from collections.abc import Sequence

from hotpot.envs import BoundEnvironment, Finding, Level, check_environment, demonstrate
from hotpot.types import Split


def environment_contract(
    env: BoundEnvironment,
    *,
    num_tasks: int = 64,
    num_episodes: int = 16,
    seed: int = 0,
    allow: Sequence[str] = (),
) -> None:
    """Check the whole contract. ``allow`` names rules whose warnings (never errors) are accepted."""
    findings = check_environment(env, num_tasks=num_tasks, num_episodes=num_episodes, seed=seed)
    kept = [finding for finding in findings if finding.level is Level.ERROR or finding.rule not in allow]
    _assert_none(env, kept)


def demonstrator_contract(
    env: BoundEnvironment, *, low: float, high: float, num_tasks: int = 500, seed: int = 0
) -> float:
    """Check that the demonstrator succeeds on a share of the training tasks in [low, high]; return the share."""
    wins = sum(
        demonstrate(env, env.task(Split.TRAIN, seed, index), seed).success for index in range(num_tasks)
    )
    share = wins / num_tasks
    if not low <= share <= high:
        raise AssertionError(
            f"the demonstrator of {env.name!r} succeeds on {share:.3f}, not in [{low}, {high}]"
        )
    return share


def _assert_none(env: BoundEnvironment, findings: Sequence[Finding]) -> None:
    if findings:
        raise AssertionError("\n".join((f"{env.env_version} breaks its contract:", *map(str, findings))))
