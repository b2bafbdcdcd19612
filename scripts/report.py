"""Write the report of the run from what it left in the store."""

from draftmill.job import Job, run
from draftmill.report.page import build_report


def main(job: Job) -> None:
    build_report(
        audits=job.inputs("audits"),
        train=job.inputs("train"),
        evaluation=job.input("evaluation"),
        audit_page=job.place.sibling(job.output("page"), job.param("audit_page")),
        counts=job.param("counts"),
        specs=job.param("specs"),
        fingerprints=job.param("fingerprints"),
        output=job.output("page"),
        provenance=job.provenance,
    )


run(snakemake, main)
