rule generate:
    input:
        prompts=lambda w: existing(build.published_prompts(w.shard)),
        pilot=lambda w: existing(build.before_generate(w.shard)),
        gpu=lambda w: sentinel("generate", w.shard, build.completions(w.shard)),
    output:
        completions=at(build.completions("{shard}")),
        rejected=at(build.rejected("{shard}")),
    log:
        "logs/generate/{shard}.log",
    params:
        stage="generate",
        name=lambda w: f"{w.shard}-{build.specs.fp['generate']}",
        shard=lambda w: w.shard,
        prompts=lambda w: at(build.prompts(w.shard)),
        provenance=lambda w: provenance("generate", prompts=w.shard),
    threads: build.config.resources.cpu_threads
    resources:
        gpu=build.gpus("generate"),
    priority: 10
    script:
        "../scripts/generate.py"
