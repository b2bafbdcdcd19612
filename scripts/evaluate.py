"""Measure the drafter's acceptance on held-out prompts."""

from draftmill.job import Job, run


def main(job: Job) -> None:
    with job.gpus() as lease:
        from draftmill.stages.assemble import evaluate_checkpoint

        evaluate_checkpoint(
            job.config,
            drafter=job.input("model").parent,
            held_out=job.inputs("held_out"),
            output=job.output("result"),
            provenance=job.provenance,
            heartbeat=job.heartbeat,
            attest=lease.attest,
        )


run(snakemake, main)
