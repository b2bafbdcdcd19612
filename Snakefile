"""draftmill: prompts become completions, hidden states, a drafter and its measured acceptance.

snakemake --cores 4 --resources gpu=4     build
snakemake -n                              plan
"""

from snakemake.exceptions import WorkflowError
from snakemake.utils import min_version

from draftmill.errors import UserError
from draftmill.workflow import Build, check_triggers

min_version("9.27")


# A file given on the command line stands alone: Snakemake would mix it, key by key, into the demo's.
if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"


try:
    limit = workflow.global_resources.get("gpu")
    build = Build.open(
        config, gpus=limit and limit.value, planning=workflow.is_main_process
    )
    build.attach(workflow)
except UserError as error:
    raise WorkflowError(str(error)) from None


wildcard_constraints:
    shard="[0-9a-f]{12}",
    window="[0-9]+",
    job="(generate|extract|train|evaluate)-[0-9a-f]+",


include: "rules/common.smk"


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


# Before the first job of a real build, and never of a plan: new prompt shards are published and needs are checked.
onstart:
    try:
        build.start()
    except UserError as error:
        raise WorkflowError(str(error)) from None


# What kills have left behind is of no use to a build that has succeeded.
onsuccess:
    build.finish()
