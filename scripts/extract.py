"""Extract one shard's hidden states."""

from draftmill.job import Job, run


def main(job: Job) -> None:
    with job.gpus() as lease:
        from draftmill.stages.extract import extract_shard
        from draftmill.target.model import Tapped, load_model

        tapped = Tapped(load_model(job.config), job.param("taps"))
        lease.attest()
        canaries = extract_shard(
            job.config,
            tapped,
            completions=job.input("completions"),
            hidden=job.output("hidden"),
            heartbeat=job.heartbeat,
            provenance=job.provenance,
        )
        for canary in canaries:
            print(canary)


run(snakemake, main)
