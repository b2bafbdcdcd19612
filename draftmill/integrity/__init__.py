"""Looking after a store: is what is there right (verify), is it still asked for (gc), and does it still count (adopt)."""
