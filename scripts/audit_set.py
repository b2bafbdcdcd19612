"""Merge the shards' audits into the page of the whole set."""

from draftmill.job import Job, run
from draftmill.stages.audit import audit_set


def main(job: Job) -> None:
    audit_set(job.inputs("audits"), job.config.audit, job.output("page"), job.provenance)


run(snakemake, main)
