"""The generated pages in docs/ are what the code says now."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from hotpot.config import Recipe
from hotpot.metrics import METRICS
from hotpot.types import TABLES

DOCS = Path(__file__).parents[1] / "docs"
NAMES = ("tables.md", "configuration.md", "metrics.md", "commands.md")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hotpot_docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_page_is_current(generator: ModuleType, name: str) -> None:
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == generator.pages()[name], f"docs/{name} is stale; run `make docs`"


def test_every_page_that_is_generated_is_checked(generator: ModuleType) -> None:
    assert set(generator.pages()) == set(NAMES)


def test_pages_cover_everything(generator: ModuleType) -> None:
    pages = generator.pages()
    assert all(f"\n## {table}\n" in pages["tables.md"] for table in TABLES)
    assert all(f"\n### {name}\n" in pages["metrics.md"] for name in METRICS)
    assert all(
        f"[{section}]" in pages["configuration.md"] for section in Recipe.model_fields if section != "name"
    )
    assert "`learner.learning_rate` | number >= 0 | `0.00015`" in pages["configuration.md"]
    assert "`topology.max_seconds` | number > 0" in pages["configuration.md"]
    for command in (
        "train",
        "eval",
        "runs",
        "show",
        "sql",
        "lineage",
        "lake compact",
        "lake quarantine list",
        "model warmstart",
        "model info",
        "env list",
        "env check",
    ):
        assert f"\n## hotpot {command}\n" in pages["commands.md"]


def test_check_names_stale_pages_and_writes_nothing(
    generator: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generator.main([], folder=tmp_path) == 0
    assert generator.main(["--check"], folder=tmp_path) == 0
    (tmp_path / "tables.md").write_text("old")
    (tmp_path / "metrics.md").unlink()
    capsys.readouterr()
    assert generator.main(["--check"], folder=tmp_path) == 1
    said = capsys.readouterr().out
    assert [name for name in NAMES if f"{name} is stale" in said] == ["tables.md", "metrics.md"]
    assert (tmp_path / "tables.md").read_text() == "old"
    assert not (tmp_path / "metrics.md").exists()
    assert generator.main([], folder=tmp_path) == 0
    assert generator.main(["--check"], folder=tmp_path) == 0


def test_an_unknown_argument_is_refused(generator: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        generator.main(["--chek"], folder=tmp_path)
    assert not list(tmp_path.iterdir())
