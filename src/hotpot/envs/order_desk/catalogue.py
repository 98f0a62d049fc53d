"""The data files of ``order_desk``: who may order, what, in which unit, and which pairs are held out.

Read once, when the package is imported; immutable afterwards. A (customer, item) pair is held out by its hash alone,
so neither seed, parameters nor the order of the files move it.
"""

import csv
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType

from hotpot.ids import sha256_hex
from hotpot.types import Split

HOLDOUT_SHARE_PERCENT = 20
"""Share of the (customer, item) pairs that never occur in training."""


def split_of(customer: str, item: str) -> Split:
    """Return the side of the wall a (customer, item) pair stands on."""
    slot = int(sha256_hex(f"{customer}\n{item}")[:8], 16) % 100
    return Split.HOLDOUT if slot < HOLDOUT_SHARE_PERCENT else Split.TRAIN


def _rows(name: str) -> list[dict[str, str]]:
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _partition(split: Split) -> dict[str, tuple[str, ...]]:
    return {
        customer: tuple(item for item in ITEMS if split_of(customer, item) is split) for customer in CUSTOMERS
    }


CUSTOMERS: tuple[str, ...] = tuple(row["name"] for row in _rows("customers.csv"))
"""Names of all customers."""
UNITS: Mapping[str, str] = MappingProxyType({row["item"]: row["unit"] for row in _rows("items.csv")})
"""The unit each item is sold in, which the price tools report."""
ITEMS: tuple[str, ...] = tuple(UNITS)
"""Names of all items."""
ITEMS_OF: Mapping[Split, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {split: MappingProxyType(_partition(split)) for split in Split}
)
"""Per split and customer, the items that may be ordered."""
PAIRS: Mapping[Split, tuple[tuple[str, str], ...]] = MappingProxyType(
    {split: tuple((c, i) for c, items in ITEMS_OF[split].items() for i in items) for split in Split}
)
"""Per split, all (customer, item) pairs that may be ordered."""
SYSTEM_PROMPT: str = resources.files(__package__).joinpath("system.txt").read_text(encoding="utf-8").strip()
"""The system prompt."""
