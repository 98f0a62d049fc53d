"""DuckDB's door to a lake on S3: reads of the files of one query, and nothing else.

DuckDB's own S3 extension is a download; Arrow's file system is here already, and this passes DuckDB's ranged reads on to
it, so that projection and predicates read only what they need. Owns which paths may be opened.
"""

from collections.abc import Collection
from typing import Any

import duckdb
from fsspec.implementations.arrow import ArrowFSWrapper
from pyarrow import fs

from hotpot.experience.lake.storage import LakeLocation

_SCHEME = "s3://"


class _LakeFiles(ArrowFSWrapper):  # type: ignore[misc] # fsspec has no types
    """An fsspec file system that opens the ``allowed`` paths for reading."""

    protocol = "s3"
    cachable = False

    def __init__(self, files: fs.FileSystem, allowed: Collection[str]) -> None:
        super().__init__(files)
        self._allowed = frozenset(allowed)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix(_SCHEME)

    def _open(self, path: str, mode: str = "rb", **keywords: Any) -> Any:
        if mode != "rb" or path not in self._allowed:
            raise PermissionError(f"{path} can't be opened with mode {mode} in a query")
        return super()._open(path, mode, **keywords)


def open_door(database: duckdb.DuckDBPyConnection, location: LakeLocation, paths: Collection[str]) -> None:
    """Let ``database`` read ``paths`` (``s3://`` addresses) of the lake; does nothing for a local lake.

    Call it before the connection is locked down, with the same paths among those it may open.
    """
    if location.is_local or not paths:
        return
    files, _ = location.filesystem()
    database.register_filesystem(_LakeFiles(files, [path.removeprefix(_SCHEME) for path in paths]))
    # A lake's file is never written twice: asking again whether it changed reads a small one three times instead of once.
    database.execute("SET validate_external_file_cache = 'NO_VALIDATION'")
