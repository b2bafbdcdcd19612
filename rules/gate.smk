# One sentinel a GPU job. It asks for the same GPUs at a lower priority than every job, so that it runs just before its
# own; it lives in this run only, and the job proves the GPU again under its lease.


rule gpu_free:
    input:
        lambda w: existing(build.sentinel_waits(w.job)),
    output:
        temp(f".draftmill/gpu/{build.run_id}/{{job}}.json"),
    log:
        "logs/gpu_free/{job}.log",
    params:
        device=build.config.device,
        policy=build.config.gate.model_dump_json(),
    resources:
        gpu=lambda w: build.gpus(w.job.partition("-")[0]),
    priority: 0
    shell:
        "draftmill sentinel --device {params.device} --gpus {resources.gpu} --job {wildcards.job}"
        " --policy {params.policy:q} --out {output:q} > {log:q} 2>&1"
