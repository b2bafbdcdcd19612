"""Record what the pilot shard measured; all other shards wait for it."""

from draftmill.job import Job, run
from draftmill.stages.pilot import measure_pilot


def main(job: Job) -> None:
    measure_pilot(job.input("completions"), job.input("hidden"), job.output("pilot"), job.provenance)


run(snakemake, main)
