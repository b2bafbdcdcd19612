"""Train the drafter on one window of hidden states."""

from draftmill.job import Job, run


def main(job: Job) -> None:
    with job.gpus() as lease:
        from draftmill.stages.assemble import train_drafter

        journal, saved = job.journal_folder()
        train_drafter(
            job.config,
            hidden=job.inputs("hidden"),
            held_out=job.inputs("held_out"),
            previous=job.inputs("previous")[0].parent if job.inputs("previous") else None,
            output=job.output("model").parent,
            journal=journal,
            saved=saved,
            span=job.param("span"),
            provenance=job.provenance,
            heartbeat=job.heartbeat,
            attest=lease.attest,
        )


run(snakemake, main)
