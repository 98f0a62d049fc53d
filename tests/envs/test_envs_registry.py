import dataclasses
import json
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from hotpot.envs import BoundEnvironment, bind, list_environments, load_environment
from hotpot.envs import registry as registry_module
from hotpot.envs.order_desk import SPEC, OrderDeskParams
from hotpot.errors import EnvironmentSpecError
from hotpot.testing.environments import ECHO, EchoParams, echo_environment
from hotpot.types import Split
from hotpot.versions import diff


def point(name: str, value: str) -> metadata.EntryPoint:
    return metadata.EntryPoint(name=name, value=value, group=registry_module.ENTRY_POINT_GROUP)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[metadata.EntryPoint]:
    points = [point("order_desk", "hotpot.envs.order_desk:SPEC")]
    monkeypatch.setattr(registry_module.metadata, "entry_points", lambda group: points)
    return points


def test_order_desk_is_installed() -> None:
    (entry,) = (entry for entry in list_environments() if entry.name == "order_desk")
    assert entry.target == "hotpot.envs.order_desk:SPEC"
    assert entry.distribution == "hotpot"
    assert load_environment("order_desk").spec is SPEC


def test_listing_imports_no_environment() -> None:
    code = (
        "import sys; from hotpot.envs import list_environments; assert list_environments();"
        "sys.exit('hotpot.envs.order_desk' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_unknown_names_point_to_the_nearest(installed: list[metadata.EntryPoint]) -> None:
    with pytest.raises(
        EnvironmentSpecError, match=r"'order_dsk' \(did you mean 'order_desk'\?\); installed: order_desk"
    ):
        load_environment("order_dsk")
    with pytest.raises(EnvironmentSpecError, match=r"no parameter 'max_line' \(did you mean 'max_lines'\?\)"):
        load_environment("order_desk", {"max_line": 2})
    installed.clear()
    with pytest.raises(EnvironmentSpecError, match="installed: none"):
        load_environment("order_desk")


def test_bad_values_name_key_value_and_rule(installed: list[metadata.EntryPoint]) -> None:
    with pytest.raises(EnvironmentSpecError, match="max_lines = 3: Input should be less than or equal to 2"):
        load_environment("order_desk", {"max_lines": 3})
    with pytest.raises(EnvironmentSpecError, match="min_quantity = 9 is above max_quantity = 3"):
        load_environment("order_desk", {"min_quantity": 9, "max_quantity": 3})


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("hotpot.no_such_module:SPEC", "can't be imported"),
        ("hotpot.envs.order_desk:NO_SPEC", "can't be imported"),
        ("hotpot.envs.order_desk:OrderDeskParams", "not an EnvironmentSpec"),
        ("hotpot.testing.environments:ECHO", "spec named 'echo'"),
    ],
)
def test_broken_entry_points_are_explained(
    installed: list[metadata.EntryPoint], target: str, reason: str
) -> None:
    installed[:] = [point("broken", target)]
    with pytest.raises(EnvironmentSpecError, match=reason):
        load_environment("broken")


def test_a_name_brought_twice_is_refused(installed: list[metadata.EntryPoint]) -> None:
    installed.append(point("order_desk", "hotpot.testing.environments:ECHO"))
    with pytest.raises(EnvironmentSpecError, match="uninstall all but one"):
        load_environment("order_desk")


def test_bound_methods_fill_the_parameters_in() -> None:
    env = bind(SPEC, {"max_lines": 2})
    task = env.task(Split.TRAIN, 3, 5)
    assert env.name == "order_desk"
    assert env.params == OrderDeskParams(max_lines=2)
    assert task == SPEC.task(OrderDeskParams(max_lines=2), Split.TRAIN, 3, 5)
    assert env.system_prompt() == SPEC.system_prompt(OrderDeskParams())
    env.verify(task)
    assert env.demonstrator(task, 0) is not None
    with pytest.raises(EnvironmentSpecError, match="task index -1 is negative"):
        env.task(Split.TRAIN, 3, -1)
    without = bind(dataclasses.replace(ECHO, demonstrator=None))
    assert without.demonstrator(without.task(Split.TRAIN, 0, 0), 0) is None


def changes(old: BoundEnvironment, new: BoundEnvironment) -> list[tuple[str, str]]:
    both = [*diff(old.env_version, new.env_version), *diff(old.reward_version, new.reward_version)]
    return [(change.what, change.name) for change in both]


def test_versions_follow_parameters_and_perturbation() -> None:
    plain = load_environment("order_desk")
    assert plain.env_version.version.startswith("order_desk@1+")
    assert plain.reward_version.version.startswith("order_desk.reward@1+")
    assert changes(plain, load_environment("order_desk", {"max_quantity": 8})) == [("param", "max_quantity")]
    assert changes(plain, load_environment("order_desk", {"max_quantity": 9})) == []
    perturbed = load_environment("order_desk", perturbation="typos")
    assert perturbed.env_version.version == plain.env_version.version + "~typos"
    assert perturbed.reward_version == plain.reward_version


def test_what_the_environment_version_covers() -> None:
    manifest = json.loads(load_environment("order_desk").env_version.manifest)
    files = {name.removeprefix("hotpot/envs/") for name in manifest["files"]}
    assert {"tools.py", "order_desk/database.py", "order_desk/items.csv", "order_desk/arithmetic.py"} <= files
    assert not any("reward" in name or name.endswith("system.txt") for name in files)
    assert set(manifest["runs_on"]) == {"python", "sqlite3", "pydantic"}
    assert manifest["params"] == json.loads(OrderDeskParams().model_dump_json())


def test_reward_parameters_belong_to_one_version_or_to_both() -> None:
    split = dataclasses.replace(ECHO, reward_params=("slow_s",))
    assert [c.name for c in diff(bind(split).reward_version, bind(split, {"slow_s": 1}).reward_version)] == [
        "slow_s"
    ]
    assert bind(split).env_version == bind(split, {"slow_s": 1}).env_version
    both = dataclasses.replace(ECHO, reward_params=None)
    assert changes(bind(both), bind(both, {"slow_s": 1})) == [("param", "slow_s"), ("param", "slow_s")]


def test_a_definition_no_file_pins_down_is_refused_or_marked() -> None:
    def make(params: EchoParams) -> Any:
        return None

    spec = dataclasses.replace(ECHO, make=make)
    with pytest.raises(EnvironmentSpecError, match="closure or interactive object"):
        bind(spec)
    assert bind(spec, allow_unverifiable=True).env_version.version.endswith(".unverifiable")
    assert echo_environment(failing_starts=1).env_version.version.endswith(".unverifiable")
    with pytest.raises(EnvironmentSpecError, match="outside the hashed packages"):
        bind(dataclasses.replace(ECHO, package="hotpot.ids", reward_package="hotpot.ids"))


class OpenParams(BaseModel):
    """Not closed."""


class SetParams(BaseModel):
    """A set has no order."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    words: frozenset[str] = frozenset({"a", "b"})


def test_declarations_are_checked() -> None:
    with pytest.raises(EnvironmentSpecError, match="must be lower-case"):
        dataclasses.replace(ECHO, name="Echo Chamber")
    with pytest.raises(EnvironmentSpecError, match="closed, frozen model"):
        dataclasses.replace(ECHO, params=OpenParams)
    with pytest.raises(EnvironmentSpecError, match="no parameters of it"):
        dataclasses.replace(ECHO, reward_params=("nothing",))
    with pytest.raises(EnvironmentSpecError, match="declare it as a tuple"):
        bind(dataclasses.replace(ECHO, params=SetParams))


def test_a_spec_that_no_package_registers_is_named_by_its_module(
    installed: list[metadata.EntryPoint],
) -> None:
    found = load_environment("hotpot.testing.environments:ECHO", {"num_calls": 2})
    assert found.spec is ECHO
    assert found.env_version == echo_environment({"num_calls": 2}).env_version
    with pytest.raises(EnvironmentSpecError, match=r"can't be imported from 'hotpot\.testing\.nowhere:SPEC'"):
        load_environment("hotpot.testing.nowhere:SPEC")
    with pytest.raises(EnvironmentSpecError, match="is a ABCMeta, not an EnvironmentSpec"):
        load_environment("hotpot.testing.environments:EchoEnvironment")
    with pytest.raises(EnvironmentSpecError, match=r"is a module|can.t be imported"):
        load_environment("hotpot.testing.environments:")
