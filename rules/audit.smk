rule audit:
    input:
        completions=lambda w: existing([build.completions(w.shard)]),
        rejected=lambda w: existing([build.rejected(w.shard)]),
    output:
        json=at(build.audit("{shard}")),
        page=report(at(build.audit_page("{shard}")), category="Audit"),
    log:
        "logs/audit/{shard}.log",
    params:
        stage="audit",
        name=lambda w: f"{w.shard}-{build.specs.fp['audit']}",
        failed=lambda w: at(build.failed_audit(w.shard)),
        provenance=lambda w: provenance("audit", completions=build.completions(w.shard)),
    priority: 50
    script:
        "../scripts/audit.py"


rule audit_set:
    input:
        audits=existing(build.audit(shard) for shard in build.shards),
    output:
        page=report(at(build.audit_set()), category="Audit"),
    log:
        "logs/audit_set.log",
    params:
        stage="audit_set",
        name="set",
        provenance=provenance("audit_set", audits=[build.audit(shard) for shard in build.shards]),
    localrule: True
    script:
        "../scripts/audit_set.py"
