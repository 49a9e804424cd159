"""The doctor: which promises a machine, its frameworks and a program can keep, found by computing."""
