"""Audit one shard; over a limit, the build behind it stops."""

from draftmill.audit.tokens import token_info
from draftmill.job import Job, run
from draftmill.stages.audit import audit_shard
from draftmill.target.tokenizer import generation_config, load_tokenizer, stop_ids


def main(job: Job) -> None:
    target = job.config.target
    tokenizer = load_tokenizer(target)
    ends = stop_ids(tokenizer, generation_config(target))
    tokens = token_info(tokenizer, ends, target.chat_template_args)
    failed = job.param("failed")
    with job.place.beside(failed, failed.rpartition("-")[0] + "-") as place:
        result = audit_shard(
            job.input("completions"),
            job.input("rejected"),
            job.output("json"),
            job.output("page"),
            job.config.audit,
            tokens,
            job.provenance,
            failed=place,
        )
    print(result.verdict)


run(snakemake, main)
