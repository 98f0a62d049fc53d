"""Where experience lives: gate, write-ahead log, ledger, lake, and the way back out.

::

    trajectories ─► gate ─► log (fsync) ─► ledger ─► acknowledged          RunReader ◄─ watermark + log tail
                     │        └─► archive thread ─► Delta tables ─► watermark ─► log segment deleted
                     └─► quarantine

Rooms, from the top; each imports only from those below it:

``maintenance``, ``replay``   a lake looked after; experience learned again
``requeue``                   refused records brought back
``store``                     the one writer of a run folder
``gate``, ``sequences``       what may enter; trajectories as the learner trains on them
``reading``                   SQL and columns, each record exactly once
``run_folder``                manifest, owner, and from a name to folder and lake
``lake``                      Delta tables on a folder or S3, one watermark a run, and the thread that fills them
``log``                       write-ahead log, ledger, and the step that acknowledges
``records``                   schema, types, upgrades, secrets taken out
``disk``, ``crashpoints``     waiting for the device; named places for crash tests
"""

from hotpot.experience.gate.door import ArrowRecords
from hotpot.experience.gate.gate import Refusal, check
from hotpot.experience.gate.rules import RULES, Limits
from hotpot.experience.lake.health import ArchiveStatus
from hotpot.experience.lake.storage import LakeLocation
from hotpot.experience.log.ledger import MARKS, Lease, Ledger, LedgerCounts
from hotpot.experience.reading.analytics import FlatColumn, Run, TableColumns, flat, open_run
from hotpot.experience.reading.reader import RunReader
from hotpot.experience.records.redact import Redactor
from hotpot.experience.records.schema import COLUMNS, SCHEMAS, from_table, to_table
from hotpot.experience.requeue import Refused, RequeueReport, list_refused, requeue
from hotpot.experience.run_folder.manifest import Manifest, read_manifest
from hotpot.experience.sequences.pieces import Cutting, Markup, cut_sequence
from hotpot.experience.sequences.segments import TrainingSequence, read_trajectories, sequences
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
