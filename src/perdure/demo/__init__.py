"""The main job: training on digits that is killed, resumed elsewhere, and ends with the same bits."""

REPLICAS = 8
BATCH = 128
SAVE_EVERY = 5
GUARDS = ("position", "rng", "tree")
"""What `--without` removes: the restored data position, random numbers by replica instead of by device,
the fixed tree of sums instead of the framework's all-reduce."""
