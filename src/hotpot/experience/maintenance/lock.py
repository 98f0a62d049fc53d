"""One maintenance of a run at a time, and never beside a writer where that would harm.

Owns which locks which work needs. Compaction and vacuum may go on beside the run's writer; deleting may not.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hotpot.errors import StoreError
from hotpot.experience.lake.lake import LAKE_ERRORS, plain
from hotpot.experience.reading.reader import RunReader
from hotpot.experience.run_folder.owner import OwnerLock

MAINTENANCE_LOCK = "maintenance.lock"
"""File of the lock, beside the owner's in the run folder."""

_REFUSAL = "is being maintained by {}; one maintenance goes on at a time"


@contextmanager
def maintaining(reader: RunReader, *, alone: bool = False) -> Iterator[Path]:
    """Hold a run's maintenance lock, and with ``alone`` its owner's lock too; yields the run folder.

    Raises :class:`hotpot.errors.RunFolderError` naming the process that holds one of them, and :class:`StoreError`
    where the run was opened by its lake alone (the locks lie in the run folder), or where its storage failed the work inside.
    """
    folder = reader.run_folder
    if folder is None:
        raise StoreError(
            f"run {reader.manifest.run_id} was opened by its lake; its locks lie in its run folder, so name that"
        )
    with ExitStack() as held:
        held.callback(OwnerLock(folder, MAINTENANCE_LOCK, _REFUSAL).release)
        if alone:
            held.callback(OwnerLock(folder).release)
        try:
            yield folder
        except LAKE_ERRORS as error:
            reader.lake.forget()
            raise StoreError(
                f"maintenance of {folder} was cut off by its lake {reader.lake.location.uri}: {plain(error)}; check the "
                "storage, then repeat it"
            ) from error
