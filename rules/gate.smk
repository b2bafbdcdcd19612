# One sentinel a GPU job. It waits for its job's inputs and asks for the same GPUs at a lower priority than every job,
# so that it runs just before its own; it lives in this run only, and the job proves the GPU again under its lease.


rule gpu_free:
    input:
        job_inputs,
    output:
        local(temp(f".draftmill/gpu/{build.run_id}/{{job}}.json")),
    log:
        local("logs/gpu_free/{job}.log"),
    priority:
        (lambda w: graph.turn(*w.job.split("-")[:2]))
        if build.config.generate.engine == "sglang"
        else 0
    resources:
        gpu=lambda w: graph.gpus(w.job.partition("-")[0]),
    params:
        device=(
            (lambda w: build.config.gate_device(w.job.partition("-")[0]))
            if build.config.generate.sglang.urls
            else build.config.device
        ),
    shell:
        sentinel_command
        + " --device {params.device} --gpus {resources.gpu} --job {wildcards.job} --out {output:q} > {log:q} 2>&1"
