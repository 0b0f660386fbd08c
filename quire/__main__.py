"""`python -m quire` is the command `quire`."""

from quire.cli.main import main

main()
