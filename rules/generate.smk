rule generate:
    input:
        unpack(lambda w: inputs("generate", w.shard)),
    output:
        completions=at(graph.completions("{shard}")),
        rejected=at(graph.rejected("{shard}")),
    log:
        local("logs/generate/{shard}.log"),
    # Above extract where servers generate: they start once, not once a shard.
    priority:
        (lambda w: 25 + graph.turn("generate", w.shard))
        if build.config.generate.engine == "sglang"
        else 10
    retries: build.retries
    threads: build.config.resources.cpu_threads
    resources:
        gpu=graph.gpus("generate"),
    params:
        stage="generate",
        name=f"{{shard}}-{fp['generate']}",
        shard="{shard}",
        prompts=graph.prompts("{shard}"),
        ahead=(
            (lambda w: graph.coming(w.shard))
            if build.config.generate.engine == "sglang"
            else []
        ),
        provenance=lambda w: provenance("generate", prompts=w.shard),
    script:
        "../scripts/generate.py"
