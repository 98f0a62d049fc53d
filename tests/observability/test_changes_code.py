"""What lineage says of code that was changed and not committed."""

from hotpot.observability.changes import MAX_DIFF_LINES, manifest_differences
from hotpot.observability.scopes import scope_of


def test_the_lines_in_which_uncommitted_changes_differ() -> None:
    old = {"commit": "a", "diff_hash": "1", "diff": "+same\n+left"}
    new = {"commit": "a", "diff_hash": "2", "diff": "+same\n+came"}
    found = [(d.part, d.where, d.old, d.new) for d in manifest_differences(old, new)]
    assert ("code", "diff_hash", "1", "2") in found
    assert ("code", "uncommitted changes", "+left", "+came") in found


def test_nothing_is_said_where_a_manifest_kept_no_text_or_nothing_differs() -> None:
    assert list(manifest_differences({"diff": None}, {"diff": "+x"})) == []
    assert list(manifest_differences({"diff": "+x"}, {"diff": "+x"})) == []


def test_long_differences_are_cut() -> None:
    long = "\n".join(f"+{number}" for number in range(10 * MAX_DIFF_LINES))
    [difference] = manifest_differences({"diff": ""}, {"diff": long})
    assert len(difference.new.splitlines()) == MAX_DIFF_LINES


SOURCE = """import x

@x.tool
def tool():
    if x:
        return 1


class Desk:
    size = 1

    async def price(self):
        def inner(): return 2
        return inner
"""


def test_the_function_around_a_line() -> None:
    scopes = [scope_of(SOURCE, line) for line in (1, 3, 6, 8, 10, 12, 13, 14)]
    assert scopes == ["", "tool", "tool", "", "Desk", "Desk.price", "Desk.price.inner", "Desk.price"]
    assert scope_of("no, python here is", 1) == ""
