"""Writing a text file so that readers see the old one or the whole new one, never a part."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def replace_text(path: Path, chunks: Iterable[str]) -> None:
    """Write ``chunks`` to ``path`` through a temporary file beside it, fsynced and then renamed.

    The folder must exist. On any error the old file stays and the temporary one is removed. Raises OSError.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
