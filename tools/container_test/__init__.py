"""``make container-test``: the image and the pods of ``deploy/``, really built and really run, without a cluster.

A base image is made with mmdebstrap, the image built from it as ``deploy/Containerfile`` says, and its promises are
checked. Then the pods of the overlay ``cpu-dev`` are started from the manifests: one pod and one claim an ordinal of
the StatefulSet, one pod an index of the workers' Job. They train the quickstart; one server is killed on the way.

Everything runs in namespaces of its own (``machine``), so that nothing of it is left on the machine, however it ends.
"""
