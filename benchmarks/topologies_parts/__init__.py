"""Parts of the benchmark of topologies."""
