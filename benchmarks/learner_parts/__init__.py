"""Parts of ``benchmarks/learner.py``: the work, the two sides, and whose turn it is. ``gae.py`` is a benchmark of its own."""
