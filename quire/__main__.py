"""Entry point of `python -m quire`, the same as the `quire` command."""

from quire.cli.main import main

main()
