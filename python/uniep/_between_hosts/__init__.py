"""What crosses between hosts that compute a layer together, and what their ranks agree on.

``passes`` says how a layer is spread over them, ``place`` which hosts the ranks of a group are on.
A :class:`~.host_mesh.HostMesh` is a process's place among hosts, ``exchange`` the messages between
them, ``routes`` the tokens that cross, ``all_rows`` their rows in place of sums, and ``crossing``
what crosses beside the passes of a call. ``agreement`` compares what ranks are called with,
``agreed_faults`` what went wrong.
"""
