"""Parts of ``make bench-faults``: which faults, the process that meets one, what came of it."""
