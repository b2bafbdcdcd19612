rule train:
    input:
        hidden=lambda w: existing(build.hidden(shard) for shard in build.windows[int(w.window)]),
        held_out=existing(build.hidden(shard) for shard in build.held_out),
        previous=lambda w: existing(build.previous_window(int(w.window))),
        audits=lambda w: existing(build.before_train(int(w.window))),
        gpu=lambda w: sentinel("train", w.window, build.drafter(w.window, "model.safetensors")),
    output:
        model=at(build.drafter("{window}", "model.safetensors")),
        config=at(build.drafter("{window}", "config.json")),
        trainer=at(build.drafter("{window}", "trainer.safetensors")),
        log=at(build.drafter("{window}", "train.json")),
    log:
        "logs/train/{window}.log",
    params:
        stage="train",
        name=lambda w: f"{build.specs.fp['train']}-{w.window}",
        span=lambda w: build.span(int(w.window)),
        provenance=lambda w: provenance("train", window=int(w.window), hidden=build.windows[int(w.window)]),
    threads: build.config.resources.cpu_threads
    resources:
        gpu=build.gpus("train"),
    priority: 30
    script:
        "../scripts/train.py"
