"""Answer one shard's prompts."""

from collections.abc import Iterator
from contextlib import contextmanager

from draftmill.job import Job, run
from draftmill.stages.generate import Answering, generate_shard, open_engine


@contextmanager
def in_process(job: Job) -> Iterator[Answering]:
    with job.gpus() as lease:
        answering = open_engine(job.config)
        lease.attest()
        yield answering


def main(job: Job) -> None:
    from draftmill.stages.reuse import Forerunners
    from draftmill.stages.serving import answering as by_servers

    opened = by_servers if job.config.generate.engine == "sglang" else in_process
    with opened(job) as answering:
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


run(snakemake, main)
