# One sentinel a GPU job. It waits for its job's inputs and asks for the same GPUs at a lower priority than every job,
# so that it runs just before its own; it lives in this run only, and the job proves the GPU again under its lease.


rule gpu_free:
    input:
        job_inputs,
    output:
        temp(f".draftmill/gpu/{build.run_id}/{{job}}.json"),
    log:
        "logs/gpu_free/{job}.log",
    priority: 0
    resources:
        gpu=lambda w: graph.gpus(w.job.partition("-")[0]),
    params:
        python=sys.executable,
        device=build.config.device,
        policy=build.config.gate.model_dump_json(),
    shell:
        "{params.python:q} -m draftmill sentinel --device {params.device} --gpus {resources.gpu} --job {wildcards.job}"
        " --policy {params.policy:q} --out {output:q} > {log:q} 2>&1"
