"""Answer one shard's prompts."""

from draftmill.job import Job, run


def in_process(job: Job) -> None:
    from draftmill.stages.generate import generate_shard, open_engine
    from draftmill.stages.reuse import Forerunners

    with job.gpus() as lease:
        answering = open_engine(job.config)
        lease.attest()
        generate_shard(
            job.config,
            answering,
            prompts=job.place.read(job.param("prompts")),
            completions=job.output("completions"),
            rejected=job.output("rejected"),
            journal=job.journal(),
            heartbeat=job.heartbeat,
            provenance=job.provenance,
            forerunners=Forerunners(job.store, *job.name.split("-"), mixed=bool(job.config.generate.mix)),
        )


def main(job: Job) -> None:
    if job.config.generate.engine == "sglang":
        from draftmill.stages.serving import generate_on_servers

        generate_on_servers(job)
    else:
        in_process(job)


run(snakemake, main)
