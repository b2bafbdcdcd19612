rule evaluate:
    input:
        unpack(lambda w: inputs("evaluate")),
    output:
        result=at(graph.evaluation()),
    log:
        local("logs/evaluate.log"),
    priority: 40
    retries: build.retries
    threads: build.config.resources.cpu_threads_alone
    resources:
        gpu=graph.gpus("evaluate"),
    params:
        stage="evaluate",
        name=fp["evaluate"],
        provenance=provenance(
            "evaluate", drafter=graph.drafter(graph.last_window, "model.safetensors")
        ),
    script:
        "../scripts/evaluate.py"
