"""Parts of ``benchmarks/store.py``: the load, the measurements, and what is compared with."""
