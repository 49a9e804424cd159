"""The causes that a diagnosis can name: how they are probed, their meaning, and how to repair them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Diagnosis:
    """A cause by its name in `CAUSES`, its meaning, how to repair it, and the evidence."""

    cause: str
    what: str
    advice: str
    evidence: tuple[str, ...]


NONDETERMINISM_PROBES = (
    # First, because every probe that runs code in the program leaves other bytes in free memory.
    ("memory", "memory", "the same pattern in all memory that nothing was written to"),
    ("clock", "time", "a clock that only counts how often it is read"),
    ("seed", "unseeded", "a fixed seed in place of the system's entropy"),
    ("hash", "hash order", "PYTHONHASHSEED=0"),
    ("addresses", "addresses", "the same addresses in each process (and PYTHONHASHSEED=0)"),
    ("process", "process", "a fixed number of the process and of the attempt"),
    ("one thread", "threads", "one thread"),
)
"""Each probe that removes a cause of differences between any two runs: probe, cause, and effect."""

CACHE_PROBES = (
    ("no caches", "stale value", "functools.cache and lru_cache that keep nothing"),
    ("no jit", "stale value", "functions that JAX does not compile"),
)
"""Each probe that makes the undisturbed run, too, compute values again that it would have kept."""

ENVIRONMENT_PROBES = {
    "shuffled directories": "directory order",
    "poisoned memory": "memory",
    "late threads": "threads",
    "fast timers": "time",
}
"""The cause that each change of the environment, as on another machine, adds."""

_DRILL_CAUSES = """
time: the result depends on the clock
    Let no value of time.time(), datetime.now() or a timer reach the state or the update; use the step
    instead, or read the clock once and keep the value in the state.

unseeded: random numbers are drawn from an unseeded source
    Seed it: np.random.default_rng(seed), random.seed(seed), torch.manual_seed(seed),
    keras.utils.set_random_seed(seed); derive what a step draws from (seed, step). `secrets`,
    os.urandom and uuid4 cannot be seeded.

hash order: the result depends on the hashes of strings: the order of a set of them, or hash()
    Sort what you iterate over: sorted(names). PYTHONHASHSEED changes in every process.

addresses: the result depends on the addresses of objects: id(), or the order of a set of objects
    Sort by a name or a number, or use a dict or a list: they keep the order of insertion.

left over: a run finds what an earlier run has left outside of its working directory
    Write below the working directory, or make what the evidence names complete before the first run:
    a cache must have the same content for each run that reads it.

process: the result depends on the process: its number, or the number of the attempt
    Let neither PERDURE_ATTEMPT nor os.getpid() reach a seed, the state or the update; use the step
    and the rank instead.

memory: the result depends on memory that nothing was written to
    Replace np.empty and torch.empty by zeros, or write every element before the first read.

threads: the result depends on the order in which threads end or add
    Collect the results in the order of their tasks and add them in that order (list(pool.map(...)),
    not as_completed), or call torch.use_deterministic_algorithms(True): floating-point sums depend on
    their order.

directory order: the result depends on the order in which a directory lists its files
    Sort what os.listdir, os.scandir, glob and Path.iterdir return: each file system has its own.

random generator: a random generator is not restored
    Derive every draw from the seed and the step, np.random.default_rng((seed, step)), or put the
    generator into the state that is saved: {'rng': generator.bit_generator.state, ...}.

other seed: a random generator begins with another seed after a resume
    Give it the same seed at each start, and save its state; or derive every draw from the seed and
    the step: np.random.default_rng((seed, step)).

data position: the data start again from the beginning after a resume
    Take the batch of a step by its number (perdure.ArrayDataset: dataset.batch(step)), save the
    iterator with the state, or skip the first `start` batches after a restore.

iterator: an iterator that gives numbers begins again after a resume
    Take its item by the number of the step (rates[step]), keep its position in the state, or skip the
    first `start` items after a restore.

file: a file that the program writes is not as it was at the checkpoint
    Keep in the state what decides a later step: a resumed program repeats steps, and finds the lines
    that it has written already. Or cut the file back to the restored step.

stale value: a cache or a compiled function keeps a value that a resumed process computes anew
    Give a compiled function what changes as an argument, because a variable is read only when it is
    traced; and keep nothing that depends on the state in functools.cache or lru_cache.

unsaved state: something that the process held at the checkpoint is not there after a resume
    Put what the evidence names into the state that is saved, and continue from the restored value;
    change the state before the save and not after it.

metric state: something that is only counted or averaged is not saved
    Put the sums and counts from which these leaves are computed into the state, and continue from
    them after a restore; a mean alone cannot be continued.

skipped steps: the loop skips steps after a resume
    Save a checkpoint under the number of steps that are finished, and begin the loop at the number
    that the restore returns.

several: more than one thing has to be put back
    The evidence names them; repair each, and drill again.

topology: the result depends on how many devices or workers there are
    A sum over devices (psum, all_reduce) adds in an order that follows their number. Use a strategy
    with replicas=V: its tree of sums does not know the devices.

end: the program, started again after its last checkpoint, does not end as it did
    Decide from the restored state, before the first step, whether anything is left to do, and let
    what follows the loop need nothing that only the loop makes. It happens to a job that is killed
    between its last save and its end.

counted again: a resumed run continues past the last step of an undisturbed one
    Let the loop count what is left: for step in range(start, steps) with the step that the restore
    returns, for epoch in range(loader.epoch, epochs) with a ResumableLoader.

early exit: the program ended with status 0 after SIGTERM, before it had finished
    End with status 75 after a save that was asked for: manager.save_and_exit(step, state), or
    sys.exit(75). A scheduler and `perdure run` take status 0 for the end of the training.

not looked for: the same leaves differ as in an earlier run; its cause was not looked for
    Repair the cause of that run first, and drill again.

fails after a resume: the program fails by itself after a resume
    Read the last lines of its log below: something that it needs is missing from the checkpoint, or
    does not fit what the checkpoint holds.

unreadable: a committed checkpoint cannot be read from the run directory any more
    Look for what removes or rewrites files in the run directory: the end of the program, a clean-up
    of its own, another program. Deletion belongs to the manager: max_to_keep, or `perdure prune`.
"""

_BISECT_CAUSES = """
not repeatable: two replays of one run have other bits
    `perdure drill -- COMMAND` looks for the cause. Repair it, then compare the runs again.

other program: a run was started with another program, other arguments or on other libraries
    The recipe says what differs. Replay each run with the command that it was started with:
    --command2.

computed wrongly: a run has recorded other bits than its program computes
    If it was started with another command, name that: --command2. Otherwise suspect a faulty device
    or memory (the journal has the host of each step), or something outside of the state: `perdure
    drill -- COMMAND` looks for that, and for a result that depends on the number of devices.

changed outside: the state is changed outside of the step: before it begins, or between its end and
the record
    Look for what writes to the leaf there: a callback, a schedule, an average or a clip of the
    weights. It has to be a function of the step and of what is saved.

other draws: the step draws more, or fewer, random numbers in one of the runs
    Compare what draws from the generator in the two programs; derive every draw from the seed and the
    step, np.random.default_rng((seed, step)), so that one more changes no other.

other data: the batches of the step are not the same
    Compare what decides them: the seed of the data, their order, the files, the augmentation.

other position: the data are at another position: the batch of the step is that of another step
    Compare how each program comes to the position of a step. A batch that was fetched ahead and not
    used counts as read, unless the position that is saved leaves it out.

other key: the random numbers of the step are not the same
    Compare the seeds of the strategies (the recipe has them).

other gradient: `grad` computes other contributions from the same state, batch and key
    Compare what computes the leaf in the two programs: model, loss, precision. If it is one logical
    replica of many, look for what depends on its number, its rows or its device.

other sum: the sum of equal contributions is not the same
    Compare the releases of perdure and of the framework, which the recipe has.

other update: `update` computes another state from the same state and total
    Compare the optimizers of the two programs: learning rate, schedule, clipping, precision.

other step: the step computes another state from the same state
    Compare the two programs. If the batch is not among what is equal, record it:
    manager.journal.record(step, state, batch).

unknown: not found
    The evidence lists what was tried, and what each run excludes. Begin with what differs: which code
    writes it, and what does it read?
"""
"""What only a comparison of two runs can name (`perdure bisect`)."""


def _parsed(text: str) -> dict[str, tuple[str, str]]:
    """The meaning and the advice by name: `name: meaning`, then the advice, which is indented."""
    causes = {}
    for block in text.strip().split("\n\n"):
        head, _, advice = block.partition("\n    ")
        name, _, what = " ".join(head.split()).partition(": ")
        causes[name] = what, " ".join(advice.split())
    return causes


CAUSES = _parsed(_DRILL_CAUSES) | _parsed(_BISECT_CAUSES)
"""Meaning and advice of each cause."""


def diagnosis(cause: str, *evidence: str) -> Diagnosis:
    """The diagnosis for a name in `CAUSES`, with its evidence."""
    what, advice = CAUSES[cause]
    return Diagnosis(cause, what, advice, evidence)
