"""`python -m draftmill`: the command line without a console script on the path."""

from draftmill.cli import main

main()
