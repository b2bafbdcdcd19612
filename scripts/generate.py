"""Answer one shard's prompts."""

from pathlib import Path

from draftmill.job import Job, run


def main(job: Job) -> None:
    with job.gpus() as lease:
        from draftmill.stages.generate import generate_shard, open_engine

        answering = open_engine(job.config)
        lease.attest()
        generate_shard(
            job.config,
            answering,
            prompts=Path(job.param("prompts")),
            completions=job.output("completions"),
            rejected=job.output("rejected"),
            journal=job.journal(),
            heartbeat=job.heartbeat,
            provenance=job.provenance,
        )


run(snakemake, main)
