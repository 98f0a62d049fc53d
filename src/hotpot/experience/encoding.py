"""How each kind of column is written to Parquet."""

from deltalake import WriterProperties


def writer_properties(table: str) -> WriterProperties:
    """Return how the columns of ``table`` are encoded and compressed."""
    del table
    return WriterProperties(compression="ZSTD", compression_level=1)
