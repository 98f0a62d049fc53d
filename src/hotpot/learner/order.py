"""One fixed order of ids, so that nothing the learner computes depends on the order in which trajectories arrived."""

import re

_NUMBER = re.compile(r"(\d+)")


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key under which numbers inside ``text`` compare as numbers: "9.2.0" before "10.0.0".

    Distinct texts have distinct keys, so the order is total ("01" and "1" are told apart by their spelling).
    """
    parts = [part for part in _NUMBER.split(text) if part]
    return tuple((0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts)
