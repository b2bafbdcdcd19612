# One-line adapters between rules and the package.

import sys

graph = build.graph
fp = graph.specs.fp
at = build.at


def existing(keys):
    """Objects by key; ancient, because names decide what is current and times never do."""
    return [ancient(at(key)) for key in keys]


def inputs(stage, name="0"):
    """A job's inputs by name, its sentinel among them."""
    gate = build.sentinel(stage, name) if stage in GPU_STAGES else None
    drawn = {kind: existing(keys) for kind, keys in graph.inputs(stage, name).items()}
    return drawn | ({"gpu": ancient(gate)} if gate else {})


def job_inputs(w):
    """What the sentinel's job reads and waits for."""
    stage, _, name = w.job.partition("-")
    return existing(key for keys in graph.inputs(stage, name).values() for key in keys)


def provenance(stage, **made_from):
    """What an object says of its making."""
    return graph.specs.provenance(stage, **made_from)


def everything(_):
    """All results, after a look at settings that would replan finished work."""
    check_triggers(workflow.rerun_triggers)
    return existing(graph.results())


GPU_STAGES = ("generate", "extract", "train", "evaluate")
