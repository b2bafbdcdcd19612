"""The audit of completions: what was measured, which limits it breaks, and the page that shows it.

The reason this project exists: in one data set 87% of the answers had exactly six loss tokens, and nobody looked before
the hidden states of all of it had been extracted.
"""
