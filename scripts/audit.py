"""Audit one shard; over a limit, the build behind it stops."""

from pathlib import Path

from draftmill.audit.tokens import token_info
from draftmill.job import Job, run
from draftmill.stages.audit import audit_shard
from draftmill.target.tokenizer import load_tokenizer


def main(job: Job) -> None:
    tokens = token_info(load_tokenizer(job.config.target), (), job.config.target.chat_template_args)
    result = audit_shard(
        job.input("completions"),
        job.input("rejected"),
        job.output("json"),
        job.output("page"),
        job.config.audit,
        tokens,
        job.provenance,
        failed=Path(job.param("failed")),
    )
    print(result.verdict)


run(snakemake, main)
