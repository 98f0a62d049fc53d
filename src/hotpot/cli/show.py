"""``hotpot show``: one trajectory, step by step."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from hotpot.cli.output import make_console, print_json
from hotpot.cli.runs_folder import DEFAULT_RUNS, JsonOption, RunArgument, RunsOption, find_run, open_reader


def show(
    run: RunArgument,
    trajectory: Annotated[
        str, typer.Argument(metavar="TRAJECTORY", help="Trajectory id, for instance 17.3.0.")
    ],
    low: Annotated[
        float,
        typer.Option(
            "--low", metavar="P", min=1e-9, max=1.0, help="Mark sampled tokens below this probability."
        ),
    ] = 0.1,
    runs: RunsOption = DEFAULT_RUNS,
    json_output: JsonOption = False,
) -> None:
    """Show a trajectory step by step, coloured by stage, with log-probabilities, and what it forked from."""
    from hotpot.observability.show import load_forks, load_trajectory, show_trajectory, trajectory_json

    folder = find_run(run, runs)
    reader = open_reader(folder)
    row, steps = load_trajectory(reader, trajectory)
    forks = load_forks(reader, row, steps)
    decode = decoder_of(folder)
    if json_output:
        print_json(trajectory_json(row, steps, decode, forks))
    else:
        show_trajectory(make_console(), row, steps, decode, forks=forks, low_probability=low)


def decoder_of(run: Path) -> Callable[[Sequence[int]], str]:
    """Return what turns a run's token ids into text: the tokenizer of its newest checkpoint, else the ids themselves."""
    found = sorted(run.glob("checkpoints/*/tokenizer.json"))
    if not found:
        return lambda tokens: "".join(f"⟨{token}⟩" for token in tokens)
    # Straight from tokenizers: the whole of hotpot.models would load torch to print text.
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(found[-1]))
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))
