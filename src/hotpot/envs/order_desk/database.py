"""The desk's database and the tools over it: real SQLite, in memory, one per episode.

Knows the schema and the words of the replies; not what is asked for, nor what is right.
"""

import sqlite3
from contextlib import closing
from functools import lru_cache

from hotpot.envs.order_desk.arithmetic import evaluate
from hotpot.envs.tools import Toolbox, clip
from hotpot.errors import ToolError

_SCHEMA = """
pragma page_size = 512;
create table customers (id integer primary key, name text not null unique);
create table items (name text primary key, list_price integer not null, unit text not null) without rowid;
create table prices (
    customer integer not null, item text not null, price integer not null, primary key (customer, item)
) without rowid;
"""


Rows = tuple[tuple[str | int, ...], ...]

_IMAGES = 256
"""Filled databases that are kept: the episodes of a group begin with the same one."""


def _empty_database() -> bytes:
    """Return the image of a database with the schema and no rows: loading it is ten times faster than creating it."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.executescript(_SCHEMA)
        return db.serialize()


_EMPTY = _empty_database()


@lru_cache(maxsize=_IMAGES)
def _filled_database(customers: Rows, items: Rows, prices: Rows) -> bytes:
    """Return the image of a database with these rows. Each row that is written lets go of the interpreter's lock, which many
    threads want, so that rows are written once for all episodes that begin with them."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.deserialize(_EMPTY)
        db.execute("begin")
        db.executemany("insert into customers (name, id) values (?, ?)", customers)
        db.executemany("insert into items values (?, ?, ?)", items)
        db.executemany("insert into prices values (?, ?, ?)", prices)
        db.execute("commit")
        return db.serialize()


class Desk:
    """One database and the tools that read it. Used by one thread at a time; closed once.

    The first docstring line of a tool is read by the model, so it is in the desk's own lower-case words.
    """

    def __init__(
        self,
        *,
        customers: tuple[tuple[str, int], ...],
        items: tuple[tuple[str, int, str], ...],
        prices: tuple[tuple[int, str, int], ...],
    ) -> None:
        """Open a fresh database with (name, id), (item, list price, unit) and (customer id, item, price) rows."""
        image = _filled_database(customers, items, prices)
        self._db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._db.deserialize(image)

    def find_customer(self, name: str) -> str:
        """find a customer's id

        name: the customer's name
        """
        row = self._db.execute("select id from customers where name = ?", (name,)).fetchone()
        if row is None:
            raise ToolError(f"no customer {clip(name)}")
        return f"customer {row[0]}"

    def list_price(self, item: str) -> str:
        """read an item's list price

        item: the item's name
        """
        list_price, unit = self._item(item)
        return f"price {list_price} per {unit}"

    def customer_price(self, customer: int, item: str) -> str:
        """read the price agreed with a customer

        customer: the customer's id
        item: the item's name
        """
        _, unit = self._item(item)
        if self._db.execute("select 1 from customers where id = ?", (customer,)).fetchone() is None:
            raise ToolError(f"no customer {customer}")
        row = self._db.execute(
            "select price from prices where customer = ? and item = ?", (customer, item)
        ).fetchone()
        if row is None:
            raise ToolError(f"no price for {clip(item)}")
        return f"price {row[0]} per {unit}"

    def calculate(self, expression: str) -> str:
        """work out whole numbers

        expression: digits + - * and parentheses
        """
        return str(evaluate(expression))

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def _item(self, item: str) -> tuple[int, str]:
        row = self._db.execute("select list_price, unit from items where name = ?", (item,)).fetchone()
        if row is None:
            raise ToolError(f"no item {clip(item)}")
        return int(row[0]), str(row[1])


TOOLBOX = Toolbox(Desk.find_customer, Desk.list_price, Desk.customer_price, Desk.calculate)
"""The tools of the desk, derived once."""
