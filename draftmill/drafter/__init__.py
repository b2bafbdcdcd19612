"""The DFlash drafter: shape, model, objective, data, checkpoints, decoding. It knows nothing of stores or Snakemake."""
