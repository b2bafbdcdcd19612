rule report:
    input:
        audits=existing(build.audit(shard) for shard in build.shards),
        train=existing(
            build.drafter(window, "train.json") for window in range(len(build.windows))
        ),
        evaluation=existing([build.evaluation()]),
        pilot=existing([build.pilot()]),
    output:
        page=report(at(build.report()), category="Report"),
    log:
        "logs/report.log",
    localrule: True
    params:
        stage="report",
        name=build.specs.fp["report"],
        audit_page=build.audit_set(),
        counts=build.specs.spec["report"]["counts"],
        specs=build.specs.spec,
        fingerprints=build.specs.fp,
        provenance=provenance("report", evaluation=build.evaluation()),
    script:
        "../scripts/report.py"
