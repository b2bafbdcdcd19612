rule report:
    input:
        unpack(lambda w: inputs("report")),
    output:
        page=report(at(graph.report()), category="Report"),
    log:
        local("logs/report.log"),
    localrule: True
    params:
        stage="report",
        name=fp["report"],
        audit_page=graph.audit_set(),
        counts=graph.specs.spec["report"]["counts"],
        specs=graph.specs.spec,
        fingerprints=fp,
        provenance=provenance("report", evaluation=graph.evaluation()),
    script:
        "../scripts/report.py"
