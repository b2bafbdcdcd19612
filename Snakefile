"""draftmill: prompts become completions, hidden states, a drafter and its measured acceptance.

    snakemake --cores 4 --resources gpu=4     build
    snakemake -n                              plan
"""

from snakemake.exceptions import WorkflowError
from snakemake.utils import min_version

from draftmill.errors import UserError
from draftmill.workflow import Build

min_version("9.27")


configfile: "config/config.yaml"


try:
    limit = workflow.global_resources.get("gpu")
    build = Build.open(config, gpus=limit and limit.value)
except UserError as error:
    raise WorkflowError(str(error)) from None


wildcard_constraints:
    shard="[0-9a-f]{12}",
    window="[0-9]+",
    job="(generate|extract|train|evaluate)-[0-9a-f]+",


at = build.at


def existing(keys):
    """Objects by key; ancient, because names decide what is current and times never do."""
    return [ancient(at(key)) for key in keys]


def sentinel(stage, name, output):
    """The GPU job's sentinel: local and of this run only."""
    return [ancient(path) for path in build.sentinel(stage, name, output)]


def provenance(stage, **inputs):
    """What an object says of its making."""
    return build.specs.provenance(stage, **inputs)


def everything(_):
    """All results, after a look at settings that would replan finished work."""
    triggers = sorted(str(trigger) for trigger in workflow.rerun_triggers)
    if triggers != ["mtime"]:
        raise WorkflowError(
            "Only `--rerun-triggers mtime` keeps finished shards (names carry what decides them): use a profile of "
            f"this repository or pass it; now they are {', '.join(triggers)}."
        )
    return existing(build.results())


rule all:
    default_target: True
    input:
        everything,
    localrule: True


include: "rules/gate.smk"
include: "rules/generate.smk"
include: "rules/audit.smk"
include: "rules/extract.smk"
include: "rules/train.smk"
include: "rules/evaluate.smk"
include: "rules/report.smk"


onstart:
    build.start()
