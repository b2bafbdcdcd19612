"""The report of a run: one static page from the objects that the run left in the store."""
