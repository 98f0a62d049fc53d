"""``python -m hotpot.cli``: the same program."""

from hotpot.cli.main import main

main()
