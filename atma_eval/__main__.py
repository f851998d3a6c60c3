"""``python -m atma_eval`` is the command line."""

from atma_eval.cli import main

main()
