"""The stages as plain functions from typed inputs to files, called by scripts/ and by tests alike."""
