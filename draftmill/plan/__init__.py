"""`draftmill plan`: a dry run in a person's words, with its price.

`read` looks at the store once, everything behind it is pure: `jobs` walks the graph as Snakemake does, `causes` says why
a job is planned, `rates` and `amounts` what it takes, `plan` puts them together, `text` shows it.
"""
