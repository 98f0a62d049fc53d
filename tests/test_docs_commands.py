"""What README.md and docs/ tell a reader to type works: commands parse, SQL and Python run, links lead somewhere."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from hotpot.cli.main import app
from hotpot.config import StoreSection
from hotpot.config.load import build_recipe, load_recipe
from hotpot.experience import ExperienceStore, RunReader, sequences
from hotpot.metrics import metric
from hotpot.metrics import sql as metric_sql
from hotpot.testing.records import make_group, make_leases, make_row, make_trajectory
from hotpot.types import (
    ConsumptionRow,
    EvaluationRow,
    EventRow,
    GroupRow,
    LearnedTokensRow,
    MetricRow,
    Purpose,
    UpdateRow,
    VersionRow,
)

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
RUN_ELSEWHERE = {"environments.md", "other-readers.md"}
"""Pages whose Python is run by tests of their own (the second's with other programs' packages, in tests/interop)."""
USAGE_PAGE = "commands.md"
"""Shows usage lines with brackets, written from the commands themselves."""
BEATS = (
    '{"elapsed_s":7.0,"parts":[{"part":"actor-0","progress":3,"silent_s":2.5,"work":1},'
    '{"part":"learner","progress":1,"silent_s":0.0,"work":0}]}'
)
"""Detail of an event as the supervisor writes it, less what no page asks for."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text.strip().splitlines()[0][:60]}"


def blocks(language: str) -> list[Block]:
    return [
        Block(page.name, found, text)
        for page in PAGES
        for found, text in FENCE.findall(page.read_text(encoding="utf-8"))
        if found == language
    ]


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the commands in a console block as words; a quoted argument may go on over several lines."""
    pending = ""
    for line in text.splitlines():
        if pending:
            pending += "\n" + line
        elif line.startswith("$ "):
            pending = line[2:]
        else:
            continue
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            words = shlex.split(pending)
        except ValueError:  # a quote is still open
            continue
        pending = ""
        yield words
    assert not pending, f"the command never ends: {pending}"


def shown_commands() -> list[tuple[str, list[str]]]:
    return [(block.page, words) for block in blocks("console") for words in command_lines(block.text)]


def mentioned_commands() -> list[tuple[str, list[str]]]:
    """Commands named in running text: `hotpot ...`."""
    found = []
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        if page.name != USAGE_PAGE:
            found += [(page.name, shlex.split(span)) for span in re.findall(r"`(hotpot [^`]+)`", text)]
    return found


def parse(words: list[str], *, whole: bool) -> tuple[str, dict[str, Any]]:
    """Parse a command line against the program; return the command's name and its parameters."""
    command: Any = typer.main.get_command(app)
    rest, path = words[1:], "hotpot"
    while hasattr(command, "commands"):
        if not rest or rest[0].startswith("-"):
            assert not whole or rest in (["--help"], ["--version"]), f"{words} names no command"
            return path, {}
        assert rest[0] in command.commands, f"there is no command {path} {rest[0]}"
        path, command, rest = f"{path} {rest[0]}", command.commands[rest[0]], rest[1:]
    try:
        return path, command.make_context(path, list(rest)).params
    except Exception as error:
        if not whole and type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError"):
            return path, {}
        raise AssertionError(f"{shlex.join(words)}: {error}") from error


@pytest.fixture(scope="session")
def written_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a made-up run ``runs/first`` that has rows in every table but attempts' failures."""
    folder = tmp_path_factory.mktemp("docs")
    run = {"run_id": "first"}
    made = [t for issue in range(3) for t in make_group(run_id="first", issue=issue, size=4)]
    held_out = [make_trajectory(run_id="first", issue=0, purpose=Purpose.EVALUATION)]
    (folder / "runs").mkdir()
    store = ExperienceStore.open(
        folder / "runs" / "first", settings=StoreSection(), vocabulary_size=64, **run
    )
    with store:
        store.ledger.lease(make_leases([*made, *held_out]))
        assert len(store.append([*made, *held_out]).accepted) == 13
        learned = [
            make_row(
                LearnedTokensRow, **run, update=1, position=position, trajectory_id=s.trajectory_id, group_id=s.group_id,
                segment=s.segment, tokens=s.tokens, loss_mask=s.loss_mask.astype(np.int32), old_logprobs=s.behaviour_logprobs,
                new_logprobs=s.behaviour_logprobs, advantages=s.loss_mask.astype(np.float32),
                returns=s.loss_mask.astype(np.float32),
            )
            for position, s in enumerate(s for t in made for s in sequences(t))
        ]  # fmt: skip
        store.record_update(
            make_row(
                UpdateRow, **run, update=1, new_policy_version=2, num_tokens=9, started_us=0, finished_us=10
            ),
            [make_row(GroupRow, **run, group_id=f"g{issue}", update=1, kept=True) for issue in range(3)],
            learned,
            [make_row(ConsumptionRow, **run, trajectory_id=t.row.trajectory_id, update=1) for t in made],
        )
        store.record(
            [
                make_row(EvaluationRow, **run, label="before", purpose="evaluation", split="holdout"),
                make_row(EventRow, **run, kind="publish", detail="{}"),
                make_row(EventRow, **run, kind="beats", detail=BEATS),
                make_row(VersionRow, **run, kind="env", manifest="{}", sources="{}"),
                make_row(MetricRow, **run, name="system/memory_rss_bytes"),
            ]
        )
    return folder


def test_there_is_something_to_check() -> None:
    assert len(shown_commands()) > 20
    assert len(mentioned_commands()) > 20
    assert len(blocks("sql")) > 5
    assert len(blocks("python")) > 2


@pytest.mark.parametrize(("page", "words"), shown_commands(), ids=str)
def test_shown_command_works(page: str, words: list[str], written_run: Path) -> None:
    if words[0] == "make":
        targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert all(word in targets for word in words[1:] if "=" not in word), f"{page}: {words}"
    if words[0] != "hotpot":
        return
    path, given = parse(words, whole=True)
    settings = [text for text in given.get("overrides") or [] if "=" in text]
    recipe = given.get("recipe")
    if recipe is not None and (ROOT / recipe).is_file():
        load_recipe(ROOT / recipe, settings)
    elif path in ("hotpot train", "hotpot model warmstart"):
        build_recipe({}, [text for text in (str(recipe), *settings) if "=" in text], origin=page)
    if path == "hotpot sql" and given["metric"]:
        metric_sql(metric(given["metric"]), by=[b for b in given["by"].split(",") if b], where=given["where"])
    elif path == "hotpot sql" and given["query"]:
        RunReader.open(written_run / "runs" / "first").sql(given["query"])


@pytest.mark.parametrize(("page", "words"), mentioned_commands(), ids=str)
def test_mentioned_command_exists(page: str, words: list[str]) -> None:
    parse([word for word in words if word != "..."], whole=False)


@pytest.mark.parametrize("block", blocks("sql"), ids=str)
def test_sql_runs(block: Block, written_run: Path) -> None:
    RunReader.open(written_run / "runs" / "first").sql(block.text)


@pytest.mark.parametrize("page", sorted({block.page for block in blocks("python")} - RUN_ELSEWHERE), ids=str)
def test_python_runs(page: str, written_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of one page run one after the other, in one namespace, beside a folder ``runs``."""
    monkeypatch.chdir(written_run)
    names: dict[str, Any] = {}
    for block in blocks("python"):
        if block.page == page:
            exec(compile(block.text, page, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(found.read_text(encoding="utf-8")), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """Beneath the repository, or as the text of the architecture names them: from the package or its room down."""
    package = ROOT / "src" / "hotpot"
    roots = (ROOT, ROOT / "src", package, package / "experience", package / "learner")
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for name in re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml))\b", text):
        assert any((root / name).exists() for root in roots), (
            f"{page.name} names {name}, which does not exist"
        )


def anchors(text: str) -> set[str]:
    """Return the anchors that a Markdown page's headings get."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
