"""A run's folder: its manifest, its one owner, the checks before it is written, and the way from a name to it."""
