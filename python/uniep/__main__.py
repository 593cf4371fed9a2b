"""``python -m uniep ARGUMENTS...`` is the command line."""

from .cli import main

main()
