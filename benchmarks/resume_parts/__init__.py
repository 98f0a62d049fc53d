"""Parts of ``benchmarks/resume.py``."""
