"""The subcommands of `draftmill`, one room a file; cli.py puts them together."""
