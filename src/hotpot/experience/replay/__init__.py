"""Experience that is learned again, behind one door: :class:`Replay`.

::

    add(update, learned) ──► hot: the good of the last rounds, Arrow in memory ─────┐
            │                                                                      ├─► sampler ──► draw(update)
            └──────────────► index ◄── narrow columns of lake and log ◄── cold ────┘
                                             cache of row groups, memory-mapped ◄──┘

``replay``   the door: what topologies call                  ``sampler``  which trajectories, with what weight (pure)
``index``    one line per trajectory, in NumPy columns        ``epochs``   what was replayed in this epoch (pure)
``hot``      the good experience of the last rounds           ``cold``     any trajectory of the record, fast
``cache``    row groups of the lake, uncompressed and mapped  ``flat``     many trajectories as flat arrays
"""

from hotpot.experience.replay.drawn import Draw, Drawn, Peer
from hotpot.experience.replay.replay import Replay

__all__ = ["Draw", "Drawn", "Peer", "Replay"]
