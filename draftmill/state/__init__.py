"""The state of a build, read from its store alone, so that it is right after a crash and from any machine.

`read.Reader` lists the store and reads what has changed; everything behind it is a pure function of that snapshot and a
time: `state.state_of` counts, `shards`, `quality`, `training` and `lanes` give a page its parts, `metrics` and `screen`
show them.
"""
