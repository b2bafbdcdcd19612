"""The web page of a build: its state pushed as it changes, its answers to look at, and the same as one static file.

`board` looks at the store from a thread of its own, so that no page ever waits for a slow store; `guard` says who may
look; `app` serves; `parts`, `samples` and `detail` turn what was seen into JSON; `static_page` writes one file of it all.
Nothing here ever writes into a store.
"""
