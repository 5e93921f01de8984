"""fastserve beside other CPU engines: the same seeded work, each engine in its own process.

``make bench-peers``, or ``python -m peers --help`` with this folder's parent on the path. Modules:

- ``workloads``: what is asked, by token id; ``measures``: what an answer took.
- ``protocol``, ``worker``, ``engines``: an engine's process, and how the driver speaks with it.
- ``environments``, ``models``, ``convert``: what must be there before the first run.
- ``machine``, ``load``: what the machine can do now, and who else uses it.
- ``settings``, ``reference``: how each peer is run best, and what it is known to reach.
- ``session``, ``driver``: one process of one engine; all engines in turn.
- ``summary``, ``report``, ``chart``: medians, as text, Markdown and a picture.

Everything but ``engines``, ``convert`` and ``chart`` needs the standard library alone.
"""
