rule generate:
    input:
        unpack(lambda w: inputs("generate", w.shard)),
    output:
        completions=at(graph.completions("{shard}")),
        rejected=at(graph.rejected("{shard}")),
    log:
        "logs/generate/{shard}.log",
    priority: 10
    retries: build.retries
    threads: build.config.resources.cpu_threads
    resources:
        gpu=graph.gpus("generate"),
    params:
        stage="generate",
        name=lambda w: f"{w.shard}-{fp['generate']}",
        shard=lambda w: w.shard,
        prompts=lambda w: at(graph.prompts(w.shard)),
        provenance=lambda w: provenance("generate", prompts=w.shard),
    script:
        "../scripts/generate.py"
