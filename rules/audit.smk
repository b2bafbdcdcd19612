rule audit:
    input:
        unpack(lambda w: inputs("audit", w.shard)),
    output:
        json=at(graph.audit("{shard}")),
        page=report(at(graph.audit_page("{shard}")), category="Audit"),
    log:
        local("logs/audit/{shard}.log"),
    priority: 50
    params:
        stage="audit",
        name=f"{{shard}}-{fp['audit']}",
        failed=graph.failed_audit("{shard}"),
        provenance=lambda w: provenance("audit", completions=graph.completions(w.shard)),
    script:
        "../scripts/audit.py"


rule audit_set:
    input:
        unpack(lambda w: inputs("audit_set")),
    output:
        page=report(at(graph.audit_set()), category="Audit"),
    log:
        local("logs/audit_set.log"),
    localrule: True
    params:
        stage="audit_set",
        name=fp["audit_set"],
        provenance=provenance(
            "audit_set", audits=[graph.audit(shard) for shard in graph.shards]
        ),
    script:
        "../scripts/audit_set.py"
