rule train:
    input:
        unpack(lambda w: inputs("train", w.window)),
    output:
        model=at(graph.drafter("{window}", "model.safetensors")),
        config=at(graph.drafter("{window}", "config.json")),
        trainer=at(graph.drafter("{window}", "resume/trainer.safetensors")),
        log=at(graph.drafter("{window}", "train.json")),
    log:
        local("logs/train/{window}.log"),
    priority: 30
    retries: build.retries
    threads: build.config.resources.cpu_threads_alone
    resources:
        gpu=graph.gpus("train"),
    params:
        stage="train",
        name=lambda w: f"{fp['train']}-{w.window}",
        span=lambda w: graph.span(int(w.window)),
        provenance=lambda w: provenance(
            "train", window=int(w.window), hidden=graph.windows[int(w.window)]
        ),
    script:
        "../scripts/train.py"
