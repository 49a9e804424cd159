"""A group for at most one worker: V is 1."""

from perdure.torch import MultiWorkerMirroredStrategy

MultiWorkerMirroredStrategy(replicas=1)
