# One-line adapters between rules and the package.

import json
import shlex
import sys

graph = build.graph
fp = graph.specs.fp
at = build.at


def existing(keys):
    """Objects by key; ancient, because names decide what is current and times never do."""
    return [ancient(at(key)) for key in keys]


def inputs(stage, name="0"):
    """A job's inputs by name; a job with a sentinel leaves to it what is only waited for."""
    gate = build.sentinel(stage, name) if stage in GPU_STAGES else None
    drawn = graph.reads(stage, name) if gate else graph.inputs(stage, name)
    files = {kind: existing(keys) for kind, keys in drawn.items()}
    return files | ({"gpu": ancient(local(gate))} if gate else {})


def job_inputs(w):
    """What the sentinel's job needs and the store lacks."""
    stage, _, name = w.job.partition("-")
    return existing(graph.awaits(stage, name))


def provenance(stage, **made_from):
    """What an object says of its making."""
    return graph.specs.provenance(stage, **made_from)


def everything(_):
    """All results, after a look at settings that would replan finished work."""
    check_triggers(workflow.rerun_triggers)
    return existing(graph.targets())


# Constant for a run, so it is no parameter that Snakemake would format for every job.
sentinel_command = (
    shlex.join(
        [
            sys.executable,
            "-m",
            "draftmill",
            "sentinel",
            "--policy",
            build.config.gate.model_dump_json(),
            "--tell",
            json.dumps(
                {
                    "store": build.config.store,
                    "s3": build.config.s3.model_dump(),
                    "fp": fp,
                }
            ),
        ]
    )
    .replace("{", "{{")
    .replace("}", "}}")
)

GPU_STAGES = ("generate", "extract", "train", "evaluate")
