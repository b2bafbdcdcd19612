rule evaluate:
    input:
        model=existing([build.drafter(build.last_window, "model.safetensors")]),
        config=existing([build.drafter(build.last_window, "config.json")]),
        held_out=existing(build.completions(shard) for shard in build.held_out),
        gpu=sentinel("evaluate", "0", build.evaluation()),
    output:
        result=at(build.evaluation()),
    log:
        "logs/evaluate.log",
    params:
        stage="evaluate",
        name=build.specs.fp["evaluate"],
        provenance=provenance("evaluate", drafter=build.drafter(build.last_window, "model.safetensors")),
    threads: build.config.resources.cpu_threads
    resources:
        gpu=build.gpus("evaluate"),
    priority: 40
    script:
        "../scripts/evaluate.py"
