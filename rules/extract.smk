# Under policy window the hidden states of train shards go when their window is trained on; held-out ones always stay.
kept = temp if build.config.hidden.policy == "window" else str


rule extract:
    input:
        unpack(lambda w: inputs("extract", w.shard)),
    output:
        hidden=kept(at(graph.train_hidden("{shard}"))),
    log:
        local("logs/extract/{shard}.log"),
    priority: 20
    retries: build.retries
    threads: build.config.resources.cpu_threads
    resources:
        gpu=graph.gpus("extract"),
    params:
        stage="extract",
        name=f"{{shard}}-{fp['extract']}",
        shard="{shard}",
        taps=graph.specs.spec["extract"]["taps"],
        provenance=lambda w: provenance(
            "extract", completions=graph.completions(w.shard)
        ),
    script:
        "../scripts/extract.py"


use rule extract as extract_held_out with:
    output:
        hidden=at(graph.held_out_hidden("{shard}")),
    log:
        local("logs/extract_held_out/{shard}.log"),


rule pilot:
    input:
        unpack(lambda w: inputs("pilot")),
    output:
        pilot=at(graph.pilot()),
    log:
        local("logs/pilot.log"),
    priority: 50
    localrule: True
    params:
        stage="pilot",
        name=fp["pilot"],
        provenance=provenance("pilot", shard=graph.pilot_shard),
    script:
        "../scripts/pilot.py"
