# One-line adapters between rules and the package.

at = build.at


def existing(keys):
    """Objects by key; ancient, because names decide what is current and times never do."""
    return [ancient(at(key)) for key in keys]


def sentinel(stage, name, output):
    """The GPU job's sentinel: local and of this run only."""
    return [ancient(path) for path in build.sentinel(stage, name, output)]


def provenance(stage, **inputs):
    """What an object says of its making."""
    return build.specs.provenance(stage, **inputs)


def everything(_):
    """All results, after a look at settings that would replan finished work."""
    check_triggers(workflow.rerun_triggers)
    return existing(build.results())
