"""Parts of the benchmark of stale data."""
