"""Looking after a run's lake: fewer and larger files, none that nobody needs, and proof that all is there.

::

    compact ──► few large files          verify ──► findings by name
    vacuum  ──► no file without a use    export ──► for programs without a Delta reader
    delete  ──► one trajectory gone      sizes  ──► bytes by table and column

Every one of them may be killed at any moment and repeated. All but :func:`delete` may go on beside the run's writer and its
readers. Knows the lake's tables as files and the records as SQL, no topology.
"""

from hotpot.experience.maintenance.compact import Compacted, compact
from hotpot.experience.maintenance.delete import Deleted, delete
from hotpot.experience.maintenance.deletions import Deletion, read_deletions
from hotpot.experience.maintenance.export import Copied, copy_run, export_manifest, write_export
from hotpot.experience.maintenance.findings import Finding, Verification
from hotpot.experience.maintenance.sizes import SizeReport, sizes
from hotpot.experience.maintenance.vacuum import KEEP_UPDATES, RETENTION_HOURS, Vacuumed, vacuum
from hotpot.experience.maintenance.verify import verify
from hotpot.experience.maintenance.versions import UpdateVersions, update_versions

__all__ = [
    "KEEP_UPDATES",
    "RETENTION_HOURS",
    "Compacted",
    "Copied",
    "Deleted",
    "Deletion",
    "Finding",
    "SizeReport",
    "UpdateVersions",
    "Vacuumed",
    "Verification",
    "compact",
    "copy_run",
    "delete",
    "export_manifest",
    "read_deletions",
    "sizes",
    "update_versions",
    "vacuum",
    "verify",
    "write_export",
]
