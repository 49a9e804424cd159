"""examples/cluster: what a launcher gives and what is asked of it fit together, and the bits do too.

Slurm is played by an `srun` and a `scontrol` of these tests, submitit by its own local executor. Ray
Train is proved by `make proof-drill`: it is too large for the environment of the tests.
"""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from manifest_schema import errors

from perdure import EXIT_PREEMPTED
from perdure.distribute.cluster.sources import from_kubernetes
from perdure.runtime.ports import free_ports
from perdure.store import Run
from perdure.testing import check_run

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "cluster"
FAULTY = Path(__file__).parent / "faulty.py"
STEPS = 40
LIMIT_S = 180

# What srun does here: the tasks of a step on one host, told about it as Slurm tells them.
SRUN = """
import os, subprocess, sys
count = int(os.environ["SLURM_NTASKS"])
step = {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": str(count)}
tasks = [
    subprocess.Popen(sys.argv[1:], env={**os.environ, **step, "SLURM_PROCID": str(number)})
    for number in range(count)
]
statuses = [task.wait() for task in tasks]
sys.exit(max(128 - status if status < 0 else status for status in statuses))
"""
SCONTROL = """
import os, sys
open(os.environ["REQUEUED"], "a").write(" ".join(sys.argv[1:]) + "\\n")
"""


@pytest.fixture(autouse=True, scope="module")
def compiled_once(compiled: dict[str, str]) -> Iterator[None]:
    """All runs of this file train the same network."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in compiled.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint of one process that nothing happens to."""
    where = tmp_path_factory.mktemp("undisturbed") / "run"
    program = [sys.executable, str(EXAMPLE / "train.py"), str(where), "--steps", str(STEPS)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    found = Run(where).manifest(STEPS).fingerprint
    assert f"done: step {STEPS}" in done.stdout
    assert found in done.stdout
    return found


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to submit from, with Slurm's programs in PATH and `python` as in this process."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / f"{name}.py").write_text(text)
        _executable(programs / name, [sys.executable, str(programs / f"{name}.py")])
    # `python train.py ARGUMENTS` of the script, with what happens to it in between.
    (tmp_path / "train.py").symlink_to(FAULTY)
    _executable(programs / "python", [sys.executable])
    (tmp_path / "marks").mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("REQUEUED", str(tmp_path / "requeued"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _executable(path: Path, command: list[str]) -> None:
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)


def _attempt(job: Path, number: int, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """The batch script, as Slurm starts it for the attempt of this number."""
    slurm = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "2"}
    slurm["JAX_COORDINATOR_PORT"] = str(free_ports(1)[0])
    if number:
        slurm["SLURM_RESTART_COUNT"] = str(number)
    variables = [f"{name}={value}" for name, value in slurm.items()]
    return subprocess.run(
        ["env", *variables, str(EXAMPLE / "train.sbatch"), *arguments],
        cwd=job,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_a_job_of_slurm_is_requeued_and_goes_on(job: Path, undisturbed: str) -> None:
    """SIGTERM to every task, as --signal sends it: saved, 75, requeued, and the same bits."""
    arguments = ["marks", "13:*:SIGTERM:self", "--", "run", "--steps", str(STEPS)]
    first = _attempt(job, 0, arguments)
    assert first.returncode == EXIT_PREEMPTED, first.stderr
    assert Run("run").steps() == [13]
    assert (job / "requeued").read_text() == "requeue 77\n"
    second = _attempt(job, 1, arguments)
    assert second.returncode == 0, second.stderr
    assert (job / "requeued").read_text() == "requeue 77\n"
    assert "2 processes, from step 13" in second.stdout
    assert Run("run").manifest(STEPS).fingerprint == undisturbed
    assert len(list((job / "marks").iterdir())) == 2
    check_run("run")


@pytest.mark.parametrize(
    ("status", "crashes", "requeued"),
    [
        *[(0, 0, False), (1, 0, True), (1, 9, True), (1, 10, False), (75, 0, True), (75, 10, True)],
        (2, 0, False),  # a program that is not there, or wrong arguments
    ],
)
def test_what_slurm_is_asked_for(
    job: Path, monkeypatch: pytest.MonkeyPatch, status: int, crashes: int, requeued: bool
) -> None:
    """A crash is queued again ten times, and a preemption, which is no crash, any number of times."""
    (job / "train.py").unlink()
    (job / "train.py").write_text(f"import sys; print(sys.argv[1:]); sys.exit({status})")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    # Slurm counts preemptions too.
    monkeypatch.setenv("SLURM_RESTART_COUNT", "99")
    counted = job / "crashes-77"
    if crashes:
        counted.write_text("a crash\n" * crashes)
    done = subprocess.run(
        [str(EXAMPLE / "train.sbatch"), "a run", "b"], capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert done.stdout == "['a run', 'b']\n"  # arguments with spaces stay whole
    assert done.stderr == ""
    after = len(counted.read_text().splitlines()) if counted.exists() else 0
    assert after == crashes + (status == 1)
    assert (job / "requeued").exists() is requeued


def test_the_batch_script_asks_slurm_for_a_notice_to_the_tasks() -> None:
    asked = dict(
        re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", (EXAMPLE / "train.sbatch").read_text(), re.M)
    )
    assert "requeue" in asked
    # perdure listens to SIGTERM; without `B:` it goes to the tasks and not to the script.
    assert re.fullmatch(r"TERM@\d+", asked["signal"])
    assert int(asked["nodes"]) * int(asked["ntasks-per-node"]) > 1


def test_the_batch_script_activates_the_environment_beside_it(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job / "train.py").unlink()
    (job / "train.py").write_text("import os; print(os.environ.get('ACTIVATED'))")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    script = [str(EXAMPLE / "train.sbatch")]
    outputs = [subprocess.run(script, capture_output=True, text=True, check=True).stdout]
    (job / ".venv" / "bin").mkdir(parents=True)
    (job / ".venv" / "bin" / "activate").write_text("export ACTIVATED=yes\n")
    outputs.append(subprocess.run(script, capture_output=True, text=True, check=True).stdout)
    assert outputs == ["None\n", "yes\n"]


@pytest.mark.skipif(
    find_spec("submitit") is None, reason="submitit (extra `test`) is not installed"
)
def test_submitit_requeues_and_goes_on(tmp_path: Path, undisturbed: str) -> None:
    """Its local executor, two tasks: SIGUSR2, as before a time limit; SIGTERM to the program alone, as
    Slurm preempts and submitit ignores; then the same bits."""
    (tmp_path / "marks").mkdir()
    faulty = [
        "marks",
        "13:0:SIGUSR2:launcher",
        "25:*:SIGTERM:self",
        "--",
        "run",
        "--steps",
        str(STEPS),
    ]
    submit = [str(EXAMPLE / "submit.py"), "--cluster", "local", "--workers", "2"]
    done = subprocess.run(
        [sys.executable, *submit, "--", sys.executable, str(FAULTY), *faulty],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    marks = sorted(mark.name for mark in (tmp_path / "marks").iterdir())
    assert marks == ["13-0-SIGUSR2-launcher", "25-0-SIGTERM-self", "25-1-SIGTERM-self"]
    log = next((tmp_path / "submitit").glob("*_0_log.out")).read_text()
    assert log.count("Requeued job") == 2
    assert "2 processes, from step 13" in log
    assert "2 processes, from step 25" in log
    assert Run(tmp_path / "run").manifest(STEPS).fingerprint == undisturbed
    check_run(tmp_path / "run")


@pytest.mark.skipif(
    find_spec("submitit") is None, reason="submitit (extra `test`) is not installed"
)
@pytest.mark.parametrize(
    ("state", "rank", "again"),
    [("RUNNING", 0, True), ("SIGNALING", 0, True), ("COMPLETING", 0, False), ("RUNNING", 1, False)],
)
def test_a_job_that_scancel_ended_is_not_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, rank: int, again: bool
) -> None:
    """The states are those of a real Slurm, which would queue the cancelled job again if asked."""
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\necho {state}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    task = SimpleNamespace(global_rank=rank, cluster="slurm", job_id="77")
    assert runpy.run_path(str(EXAMPLE / "submit.py"))["_is_preempted"](task) is again


def test_another_recipe_ends_with_other_bits(tmp_path: Path, undisturbed: str) -> None:
    """Negative control: the fingerprints compared above can differ."""
    program = [sys.executable, str(EXAMPLE / "train.py"), str(tmp_path / "run")]
    subprocess.run(
        [*program, "--steps", str(STEPS), "--replicas", "4"], timeout=LIMIT_S, check=True
    )
    assert Run(tmp_path / "run").manifest(STEPS).fingerprint != undisturbed


@pytest.mark.parametrize("given", [["--", "--steps", "20"], ["--steps", "20"]])
def test_the_arguments_after_dashes_reach_the_program_of_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    """Ray is played by modules that note what they are given."""
    calls: list[Any] = []
    trainer = SimpleNamespace(fit=lambda: None)
    played = SimpleNamespace(
        FailureConfig=dict,
        RunConfig=dict,
        ScalingConfig=dict,
        JaxConfig=dict,
        JaxTrainer=lambda *_, **options: calls.append(options) or trainer,
    )
    for name in ("ray", "ray.train", "ray.train.v2", "ray.train.v2.jax", "perdure.plugins.ray"):
        monkeypatch.setitem(sys.modules, name, played)
    monkeypatch.setattr(sys, "argv", ["ray_train.py", str(tmp_path), "--workers", "2", *given])
    runpy.run_path(str(EXAMPLE / "ray_train.py"), run_name="__main__")
    arguments = calls[0]["train_loop_config"]["arguments"]
    assert arguments == [str(tmp_path), "--steps", "20"]


# ---------------------------------------------------------------- Kubernetes


def _manifest() -> Any:
    return yaml.safe_load((EXAMPLE / "jobset.yaml").read_text())


def _pods(manifest: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """(name, environment) of every pod that JobSet makes of the manifest, by its documentation."""
    jobset = manifest["metadata"]["name"]
    for jobs in manifest["spec"]["replicatedJobs"]:
        for job in range(jobs["replicas"]):
            labels = {
                "jobset-name": jobset,
                "replicatedjob-name": jobs["name"],
                "replicatedjob-replicas": str(jobs["replicas"]),
                "job-index": str(job),
            }
            spec = jobs["template"]["spec"]
            for pod in range(spec["completions"]):
                environ = {"JOB_COMPLETION_INDEX": str(pod)}
                for variable in spec["template"]["spec"]["containers"][0]["env"]:
                    value = variable.get("value")
                    if value is None:
                        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
                        label = re.fullmatch(
                            r"metadata\.labels\['jobset\.sigs\.k8s\.io/(.+)'\]", path
                        )
                        assert label is not None, path
                        value = labels[label[1]]
                    environ[variable["name"]] = value
                yield f"{jobset}-{jobs['name']}-{job}-{pod}", environ


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_pods_of_the_jobset_are_one_group(replicas: int) -> None:
    manifest = _manifest()
    jobs = manifest["spec"]["replicatedJobs"][0]
    spec = jobs["template"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    [count] = [each for each in container["env"] if each["name"] == "JAX_NUM_PROCESSES"]
    assert int(count["value"]) == jobs["replicas"] * spec["completions"]
    jobs["replicas"] = replicas  # as a user would change it, with the number beside it
    count["value"] = str(replicas * spec["completions"])
    pods = list(_pods(manifest))
    names = [name for name, _ in pods]
    for number, (_, environ) in enumerate(pods):
        found = from_kubernetes(environ, lambda: "a-node")
        assert found is not None
        assert (found.process_id, found.num_processes) == (number, len(pods))
        assert found.coordinator == f"{names[0]}.train:55527"
        assert found.addresses == tuple(f"{name}.train" for name in names)


def test_the_jobset_restarts_as_a_group() -> None:
    """By the rules of Job and JobSet: 75 and a drained node cost no restart, all else does."""
    manifest = _manifest()
    policy = manifest["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0
    [free] = policy["rules"]
    assert free["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert free["onJobFailureReasons"] == ["PodFailurePolicy"]
    [jobs] = manifest["spec"]["replicatedJobs"]
    spec = jobs["template"]["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    saved, moved = spec["podFailurePolicy"]["rules"]
    assert saved["action"] == moved["action"] == "FailJob"
    assert saved["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [EXIT_PREEMPTED],
    }
    assert moved["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]  # all at once, or they wait for each other
    assert spec["backoffLimit"] == 0
    assert pod["restartPolicy"] == "Never"  # what podFailurePolicy asks for
    assert pod["terminationGracePeriodSeconds"] >= 60
    # GPUs are limits, not requests alone; /dev/shm is memory, and fits into that of the pod.
    limits = container["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) > 0
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    shared = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shared["medium"] == "Memory"
    assert _gibibytes(shared["sizeLimit"]) < _gibibytes(limits["memory"])
    assert f"docker build -t {container['image']} " in (EXAMPLE / "Dockerfile").read_text()
    # Python itself is what the pod starts, so that SIGTERM reaches it.
    assert container["command"][:2] == ["python", "train.py"]


def _described() -> Any:
    return yaml.safe_load((Path(__file__).parent / "jobset_fields.yaml").read_text())


def test_the_jobset_has_the_fields_of_jobset() -> None:
    assert list(errors(_described(), _manifest())) == []


def test_the_job_on_the_page_has_the_fields_of_a_job() -> None:
    page = (ROOT / "docs" / "CLUSTER.md").read_text()
    [block] = re.findall(r"```yaml\n(.*?)```", page, re.S)
    service, job = yaml.safe_load_all(block)
    jobs = _described()["properties"]["spec"]["properties"]["replicatedJobs"]["items"]["properties"]
    assert list(errors(jobs["template"]["properties"]["spec"], job["spec"])) == []
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]


def _changed(path: str, value: Any) -> Any:
    """The manifest with another value at a path; None removes the field."""
    manifest = _manifest()
    *parents, last = (int(name) if name.isdigit() else name for name in path.split("."))
    place = manifest
    for name in parents:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return manifest


_JOB = "spec.replicatedJobs.0.template.spec"


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        ("spec.failurePolicy.rules.0.name", None, "rules[0].name: missing"),
        ("spec.failurePolicy.rules.0.action", "Restart", "expected one of"),
        ("spec.failurePolicy.maxRestart", 3, "maxRestart: unknown"),
        (f"{_JOB}.podFailurePolicy.rules.1.onPodConditions.0.status", True, "expected string"),
        (f"{_JOB}.template.spec.containers.0.env.0.value", 4, "expected string"),
        (f"{_JOB}.template.spec.containers.0.resources.limits.memory", True, "integer or string"),
        (f"{_JOB}.backoffLimit", "0", "expected integer"),
    ],
)
def test_a_mistake_in_the_jobset_is_found(path: str, value: Any, error: str) -> None:
    """Control: each is refused by the published schema too (make proof-nodes)."""
    [found] = errors(_described(), _changed(path, value))
    assert error in found


def _gibibytes(text: str) -> int:
    return int(text.removesuffix("Gi"))
