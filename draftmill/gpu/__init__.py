"""The GPU gate: positive proof that GPUs are free, a lease on each one in use, and a clean way back.

Self-contained on purpose (it imports `draftmill.errors` and its own folder, never torch): every command and every parse
of the Snakefile pays for what is imported here, and a gate that needs CUDA to run could not judge a broken CUDA.

`gate.sentinel` and `gate.lease` are what the workflow calls; docs/gpu-gate.md says what they decide and why.
"""
