"""Where experience lives: gate, write-ahead log, ledger, lake, and the way back out.

::

    trajectories ─► gate ─► log (fsync) ─► ledger ─► acknowledged          RunReader ◄─ watermark + log tail
                     │        └─► archive thread ─► Delta tables ─► watermark ─► log segment deleted
                     └─► quarantine

``store``      the one writer of a run folder          ``reader``    SQL and columns, each record exactly once
``gate``       what a trajectory must keep (``rules``)  ``door``      other programs' records (``upgrades``, ``requeue``)
``entrance``   what the gate remembers (``breaker``)    ``segments``  trajectories as the learner trains on them
``ledger``     attempts, consumptions, marks            ``manifest``  what a run was started with
``lake``       Delta tables, one watermark a run        ``redact``    secrets out of text
``storage``    where a lake lies: a folder or S3         ``places``    from a name to folder, manifest and lake
``archive``    log segments to the lake, outages too     ``budget``    a stop before the disk is full
``pieces``     segments cut to a length
"""

from hotpot.experience.analytics import FlatColumn, Run, TableColumns, flat, open_run
from hotpot.experience.door import ArrowRecords
from hotpot.experience.gate import Refusal, check
from hotpot.experience.health import ArchiveStatus
from hotpot.experience.ledger import MARKS, Lease, Ledger, LedgerCounts
from hotpot.experience.manifest import Manifest, read_manifest
from hotpot.experience.pieces import Cutting, Markup, cut_sequence
from hotpot.experience.reader import RunReader
from hotpot.experience.redact import Redactor
from hotpot.experience.requeue import Refused, RequeueReport, list_refused, requeue
from hotpot.experience.rules import RULES, Limits
from hotpot.experience.schema import COLUMNS, SCHEMAS, from_table, to_table
from hotpot.experience.segments import TrainingSequence, read_trajectories, sequences
from hotpot.experience.storage import LakeLocation
from hotpot.experience.store import AppendReport, ExperienceStore

__all__ = [
    "COLUMNS",
    "MARKS",
    "RULES",
    "SCHEMAS",
    "AppendReport",
    "ArchiveStatus",
    "ArrowRecords",
    "Cutting",
    "ExperienceStore",
    "FlatColumn",
    "LakeLocation",
    "Lease",
    "Ledger",
    "LedgerCounts",
    "Limits",
    "Manifest",
    "Markup",
    "Redactor",
    "Refusal",
    "Refused",
    "RequeueReport",
    "Run",
    "RunReader",
    "TableColumns",
    "TrainingSequence",
    "check",
    "cut_sequence",
    "flat",
    "from_table",
    "list_refused",
    "open_run",
    "read_manifest",
    "read_trajectories",
    "requeue",
    "sequences",
    "to_table",
]
