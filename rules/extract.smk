# Under policy window the hidden states of train shards go when their window is trained on; held-out ones always stay.
kept = temp if build.config.hidden.policy == "window" else str


rule extract:
    input:
        completions=lambda w: existing([build.completions(w.shard)]),
        before=lambda w: existing(build.before_extract(w.shard)),
        gpu=lambda w: sentinel("extract", w.shard, build.hidden(w.shard)),
    output:
        hidden=kept(at(build.hidden("{shard}"))),
    log:
        "logs/extract/{shard}.log",
    params:
        stage="extract",
        name=lambda w: f"{w.shard}-{build.specs.fp['extract']}",
        shard=lambda w: w.shard,
        taps=build.specs.spec["extract"]["taps"],
        provenance=lambda w: provenance("extract", completions=build.completions(w.shard)),
    threads: build.config.resources.cpu_threads
    resources:
        gpu=build.gpus("extract"),
    priority: 20
    script:
        "../scripts/extract.py"


use rule extract as extract_held_out with:
    output:
        hidden=at(build.held_out_hidden("{shard}")),
    log:
        "logs/extract_held_out/{shard}.log",


rule pilot:
    input:
        completions=existing([build.completions(build.pilot_shard)]),
        audit=existing([build.audit(build.pilot_shard)]),
        hidden=existing([build.hidden(build.pilot_shard)]),
    output:
        pilot=at(build.pilot()),
    log:
        "logs/pilot.log",
    params:
        stage="pilot",
        name=build.pilot_shard,
        provenance=provenance("pilot", shard=build.pilot_shard),
    localrule: True
    priority: 50
    script:
        "../scripts/pilot.py"
