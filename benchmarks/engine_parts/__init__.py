"""Parts of ``benchmarks/engine.py``: the work, the sides as processes, whose turn it is, and the floor of arithmetic."""
