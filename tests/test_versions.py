import json
import platform
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotpot.errors import EnvironmentSpecError, UsageError
from hotpot.versions import Change, Version, diff, package_files, package_version, prompt_version

FILES = {
    "__init__.py": "def make():\n    return 1\n",
    "data/prices.csv": "item,price\nbolt,17\nnut,5\n",
    "reward/__init__.py": "def judge():\n    return 1.0\n",
    "blob.bin": b"\x00\xff",
}
MakePackage = Callable[..., str]


@pytest.fixture
def make_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePackage:
    """Write an importable package and return its name; a later call overwrites files of the same one."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(files: dict[str, str | bytes] | None = None, name: str = "sample_pkg") -> str:
        for path, content in (FILES if files is None else files).items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delitem(sys.modules, f"{name}.reward", raising=False)
        return name

    yield make
    for module in [m for m in sys.modules if m.split(".")[0] == "sample_pkg"]:
        del sys.modules[module]


def version(package: str, **changes: Any) -> Version:
    settings: dict[str, Any] = {"kind": "env", "name": "sample", "declared": "1", "packages": (package,)}
    return package_version(**(settings | changes))


def test_manifest_names_every_file_parameter_and_package(make_package: MakePackage) -> None:
    made = version(make_package(), params={"n": 3}, runs_on=("sqlite3", "pydantic"))
    manifest = json.loads(made.manifest)
    assert set(manifest["files"]) == {f"sample_pkg/{path}" for path in FILES}
    assert manifest["params"] == {"n": 3}
    assert manifest["runs_on"]["python"] == platform.python_version()
    assert manifest["runs_on"]["sqlite3"] == sqlite3.sqlite_version
    assert set(manifest["runs_on"]) == {"python", "sqlite3", "pydantic"}
    assert manifest["unverifiable"] == []
    name, fingerprint = made.version.split("+")
    assert name == "sample@1"
    assert len(fingerprint) == 16
    assert str(made) == made.version


def test_sources_keep_small_text_only(make_package: MakePackage) -> None:
    package = make_package(FILES | {"big.txt": "x" * 64 * 1024, ".secret": "s", "latin.txt": b"\xe9"})
    sources = json.loads(version(package).sources)
    assert sources["sample_pkg/data/prices.csv"] == FILES["data/prices.csv"]
    assert set(sources) == {f"sample_pkg/{p}" for p in FILES if p != "blob.bin"}
    assert "sample_pkg/big.txt" in json.loads(version(package).manifest)["files"]


def test_caches_and_bytecode_do_not_count(make_package: MakePackage) -> None:
    package = make_package()
    before = version(package)
    make_package({"__pycache__/x.cpython-311.pyc": b"1", "old.pyc": b"2", "data/__pycache__/y": b"3"})
    assert version(package) == before


@pytest.mark.parametrize("path", sorted(FILES))
def test_a_change_in_any_file_changes_the_version(make_package: MakePackage, path: str) -> None:
    package = make_package()
    before = version(package)
    content = FILES[path]
    make_package({path: content + (b"!" if isinstance(content, bytes) else "# one more line\n")})  # type: ignore[operator]
    after = version(package)
    assert after.version != before.version
    (change,) = diff(before, after)
    assert (change.what, change.name) == ("file", f"sample_pkg/{path}")
    assert any(line == "+# one more line" for line in change.lines) == (path != "blob.bin")


def test_an_excluded_sub_package_is_versioned_apart(make_package: MakePackage) -> None:
    package = make_package()
    before = version(package, exclude=("sample_pkg.reward",))
    reward = version("sample_pkg.reward", kind="reward")
    make_package({"reward/__init__.py": "def judge():\n    return 0.5\n"})
    assert version(package, exclude=("sample_pkg.reward",)) == before
    (change,) = diff(reward, version("sample_pkg.reward", kind="reward"))
    assert change.lines[-2:] == ("-    return 1.0", "+    return 0.5")


def test_exclusion_by_path(make_package: MakePackage) -> None:
    package = make_package()
    made = version(package, exclude=("sample_pkg/data",))
    assert "sample_pkg/data/prices.csv" not in json.loads(made.manifest)["files"]
    with pytest.raises(EnvironmentSpecError, match="no such file"):
        version(package, exclude=("sample_pkg/missing.txt",))


def test_diff_says_which_line_of_a_data_file(make_package: MakePackage) -> None:
    package = make_package()
    before = version(package)
    make_package({"data/prices.csv": "item,price\nbolt,18\nnut,5\n"})
    (change,) = diff(before, version(package))
    assert [line for line in change.lines if line[0] in "+-" and line[:3] not in ("+++", "---")] == [
        "-bolt,17",
        "+bolt,18",
    ]
    assert str(change).startswith("file sample_pkg/data/prices.csv changed\n")


def test_diff_says_added_and_removed_files(make_package: MakePackage, tmp_path: Path) -> None:
    package = make_package()
    before = version(package)
    make_package({"new.py": "a = 1\n"})
    (tmp_path / package / "blob.bin").unlink()
    changes = {change.name: change for change in diff(before, version(package))}
    assert changes["sample_pkg/new.py"].old is None
    assert changes["sample_pkg/new.py"].lines[-1] == "+a = 1"
    assert changes["sample_pkg/blob.bin"].new is None
    assert str(changes["sample_pkg/blob.bin"]) == "file sample_pkg/blob.bin removed"


def test_diff_of_parameters_packages_and_declared(make_package: MakePackage) -> None:
    package = make_package()
    old = version(package, params={"n": 5, "deep": {"a": 1, "b": 2}}, runs_on=("pydantic",))
    new = version(package, params={"n": "5", "deep": {"a": 1, "b": 3}, "more": []}, declared="2")
    assert [(c.what, c.name, c.old, c.new) for c in diff(old, new)] == [
        ("declared", "declared", "1", "2"),
        ("param", "deep.b", "2", "3"),
        ("param", "more", None, "[]"),
        ("param", "n", "5", '"5"'),
        ("package", "pydantic", json.loads(old.manifest)["runs_on"]["pydantic"], None),
    ]
    assert str(diff(old, new)[-1]).endswith("-> (absent)")
    assert diff(old, old) == []


def test_diff_needs_one_kind(make_package: MakePackage) -> None:
    package = make_package()
    with pytest.raises(UsageError, match="one kind"):
        diff(version(package), version(package, kind="reward"))


JSON_LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
PARAMS = st.dictionaries(st.text(min_size=1).filter(lambda key: "." not in key), JSON_LEAVES, max_size=6)


@given(old=PARAMS, new=PARAMS)
def test_diff_names_exactly_the_parameters_that_differ(old: dict[str, Any], new: dict[str, Any]) -> None:
    before, after = version("hotpot.ids", params=old), version("hotpot.ids", params=new)
    expected = {
        key
        for key in old.keys() | new.keys()
        if key not in old or key not in new or json.dumps(old[key]) != json.dumps(new[key])
    }
    assert {change.name for change in diff(before, after)} == expected
    assert (before.version == after.version) == (not expected)


def test_perturbation_is_a_suffix(make_package: MakePackage) -> None:
    package = make_package()
    plain = version(package)
    perturbed = version(package, perturbation="typos-0.1")
    assert perturbed.version == plain.version + "~typos-0.1"
    assert version(package, perturbation="none") == plain
    assert [(c.what, c.old, c.new) for c in diff(plain, perturbed)] == [("perturbation", "none", "typos-0.1")]


@pytest.mark.parametrize("part", ["name", "declared", "perturbation"])
@pytest.mark.parametrize("text", ["", "a@b", "a+b", "a~b", "a|b", " a"])
def test_version_parts_keep_the_form_readable(make_package: MakePackage, part: str, text: str) -> None:
    with pytest.raises(EnvironmentSpecError, match="must be non-empty text"):
        version(make_package(), **{part: text})


def test_the_same_content_elsewhere_has_the_same_version(make_package: MakePackage, tmp_path: Path) -> None:
    package = make_package()
    before = version(package)
    moved = tmp_path / "moved"
    moved.mkdir()
    (tmp_path / package).rename(moved / package)
    sys.path.insert(0, str(moved))
    try:
        assert version(package) == before
    finally:
        sys.path.remove(str(moved))


def test_missing_things_are_named(make_package: MakePackage) -> None:
    package = make_package()
    with pytest.raises(EnvironmentSpecError, match="'no_such_dist' is named under runs_on"):
        version(package, runs_on=("no_such_dist",))
    with pytest.raises(EnvironmentSpecError, match="'no_such_pkg' can't be found"):
        version("no_such_pkg")
    with pytest.raises(EnvironmentSpecError, match="can't be found"):
        version("no_such_pkg.below")
    with pytest.raises(EnvironmentSpecError, match="no plain JSON"):
        version(package, params={"x": object()})
    with pytest.raises(EnvironmentSpecError, match="no plain JSON"):
        version(package, params={"x": float("nan")})


@pytest.mark.parametrize("package", ["__main__", "builtins", "sys"])
def test_a_package_without_files_is_refused_or_marked(package: str) -> None:
    with pytest.raises(EnvironmentSpecError, match="can't be verified"):
        version(package)
    marked = version(package, allow_unverifiable=True)
    assert marked.version.endswith(".unverifiable")
    assert json.loads(marked.manifest)["unverifiable"]


def top_level() -> None:
    """Stand in for a function an author defines."""


class TopLevel:
    """Stand in for a class an author defines."""

    def method(self) -> None:
        """Do nothing."""


def _closure() -> Callable[[], int]:
    number = 3
    return lambda: number


def _renamed() -> object:
    def inner() -> None:
        """Pretend to be the function at the top."""

    inner.__qualname__ = inner.__name__ = "top_level"
    return inner


UNPINNED = {
    "closure": _closure(),
    "impostor": _renamed(),
    "bound method": TopLevel().method,
    "instance": TopLevel(),
    "elsewhere": json.dumps,
}


@pytest.mark.parametrize("kind", sorted(UNPINNED))
def test_definers_no_file_pins_down_are_refused_or_marked(kind: str) -> None:
    definer = UNPINNED[kind]
    with pytest.raises(EnvironmentSpecError, match="can't be verified"):
        version(__name__, definers=(definer,))
    marked = version(__name__, definers=(definer,), allow_unverifiable=True)
    assert marked.version.endswith(".unverifiable")
    (change,) = (c for c in diff(version(__name__), marked) if c.what == "unverifiable")
    assert change.old == "[]"


def test_definers_at_the_top_of_a_covered_module_are_fine() -> None:
    assert "unverifiable" not in version(__name__, definers=(top_level, TopLevel)).version
    assert list(package_files(__name__)) == [f"{__name__.replace('.', '/')}.py"]


def test_prompt_version_covers_prompt_template_and_tokenizer() -> None:
    settings: dict[str, Any] = {"tokenizer_files": {"tokenizer.json": b"{}"}, "runs_on": ("jinja2",)}
    before = prompt_version("be right. be brief.", "{{ x }}", **settings)
    assert before.kind == "prompt"
    assert before.version.startswith("prompt@1+")
    (change,) = diff(before, prompt_version("be right. be short.", "{{ x }}", **settings))
    assert change == Change(
        what="file", name="system_prompt", old=change.old, new=change.new, lines=change.lines
    )
    assert change.lines[-2:] == ("-be right. be brief.", "+be right. be short.")
    (change,) = diff(before, prompt_version("be right. be brief.", "{{ y }}", **settings))
    assert change.name == "chat_template"
    (change,) = diff(
        before,
        prompt_version("be right. be brief.", "{{ x }}", {"tokenizer.json": b"[]"}, runs_on=("jinja2",)),
    )
    assert (change.name, change.lines) == ("tokenizer/tokenizer.json", ())
    with_code = prompt_version("be right. be brief.", "{{ x }}", renderers=("hotpot.ids",), **settings)
    assert [c.name for c in diff(before, with_code)] == ["hotpot/ids.py"]
