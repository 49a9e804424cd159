"""A group for at most one worker: V is 1. Refused as by a strategy, and without its framework."""

import os

from perdure.distribute.topology import bounds

bounds(replicas=1, devices=int(os.environ["WORLD_SIZE"]))
