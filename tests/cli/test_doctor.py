"""`ssd-offload doctor`, and what each of its checks says of machines and paths."""

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from offload_strategy.cli import machine_checks as checks
from offload_strategy.cli.doctor import check_devices, check_file_system, check_path
from offload_strategy.cli.machine_checks import OK, PROBLEM, WARNING, Check
from offload_strategy.config import OffloadConfig
from offload_strategy.config.directories import FileSystem
from offload_strategy.engine import resources
from offload_strategy.host_memory import memory_limits
from offload_strategy.host_memory.memory_limits import available_bytes, memory_cgroup_limit
from offload_strategy.units import GiB, MiB
from tests.io.loop_devices import loop_device, loop_disk


def config(**sections):
    return json.dumps({"memory": {"pinned": "16MiB"}, **sections})


_CONFIG = config()


# ---------------------------------------------------------------------------- the command
@pytest.fixture
def doctor(ssd_offload, monkeypatch):
    """Runs the command with a config; returns what it prints, of --json the checks by name."""

    def run(*words, status=0, config=_CONFIG):
        monkeypatch.setenv("SSD_OFFLOAD_CONFIG", config)
        text = ssd_offload("doctor", *words, status=status).out
        if "--json" not in words:
            return text
        report = json.loads(text)
        assert report["works"] is (status == 0)
        return {check["name"]: check for check in report["checks"]}

    return run


def test_a_machine_where_training_works_exits_with_0(disk, doctor):
    text = doctor(disk)
    assert text.splitlines()[0].startswith("ok       python: 3.")
    assert f"{disk}: direct I/O" in " ".join(text.split())  # a long path has a line of its own
    assert "problem" not in text
    assert text.splitlines()[-1].startswith("Training works here")
    checks = doctor(disk, "--json")
    assert list(checks)[:3] == ["python", "torch", "config"]
    for check in checks.values():
        assert check.keys() == {"name", "status", "found", "advice"}
        assert bool(check["advice"]) == (check["status"] != "ok"), "what to do"
    assert "could not be looked at" not in json.dumps(checks)


def test_without_a_path_those_of_the_config_are_looked_at(disk, doctor, tmp_path):
    tiers = [
        {"name": "host", "kind": "dram", "capacity": "1MiB"},
        {"name": "nvme", "kind": "ssd", "path": str(disk), "capacity": "64MiB"},
    ]
    checks = doctor("--json", config=config(tiers=tiers))
    assert checks["config"]["found"] == "tiers: host, nvme"
    assert checks[f"{disk}: space"]["found"] == "64 MiB can be used"
    tiers[1]["path"] = str(tmp_path / "missing")
    text = doctor(status=1, config=config(tiers=tiers))
    assert "mkdir -p -m 700" in text
    assert text.splitlines()[-1] == "Training would not work here: 1 problem to solve."


def test_the_default_host_tier_of_an_accelerator_is_counted(disk, doctor, monkeypatch):
    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(disk))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(resources, "has_memory_statistics", lambda device: True)
    monkeypatch.setattr(resources, "available_bytes", lambda: 64 * MiB)
    found = doctor("--json")
    assert found["config"]["found"] == "tiers: host, ssd"
    assert "takes up to 48 MiB" in found["memory"]["found"]


def test_a_wrong_config_or_a_check_that_fails_does_not_end_the_others(disk, doctor, monkeypatch):
    checks_ = doctor(disk, "--json", status=1, config='{"memory": {"pined": "1MiB"}}')
    assert checks_["config"]["status"] == "problem"
    assert "memory.pinned" in checks_["config"]["found"]
    assert checks_[f"{disk}: space"]["status"] == "ok"

    def fail():
        raise ZeroDivisionError("a kernel that we do not know")

    monkeypatch.setattr(checks, "check_huge_pages", fail)
    text = " ".join(doctor(disk).split())
    assert "warning memory: could not be looked at: ZeroDivisionError: a kernel" in text
    assert f"{disk}: space" in text


# ---------------------------------------------------------------------------- the machine
def memory(total, available, limit=None, processes=1):
    """The check of a machine with so many GiB, of which a process wants 16."""
    tiers = [{"name": "host", "kind": "dram", "capacity": "12GiB"}]
    wanted = OffloadConfig.load({"tiers": tiers, "memory": {"pinned": "4GiB"}})
    machine = {"total": total * GiB, "available": available * GiB, "limit": limit and limit * GiB}
    return checks.check_memory(wanted, processes=processes, **machine)


def file_system(kind, **more):
    return check_file_system(Path("/mnt"), FileSystem(kind, **more))


AVAILABLE = {"posix": None, "kvikio": "no NVIDIA driver"}


@pytest.mark.parametrize(
    ("found", "status", "word"),
    [
        # Memory must hold the buffers of all processes, and the host tiers that they share.
        (memory(64, 60, limit=18), OK, "takes up to 16 GiB"),
        (memory(64, 60, limit=16), PROBLEM, "takes up to 16 GiB"),
        (memory(64, 12), WARNING, "takes up to 16 GiB"),
        (memory(64, 60, processes=12), OK, "takes up to 60 GiB"),
        (memory(64, 60, processes=13), PROBLEM, "takes up to 64 GiB"),
        (memory(8, 8), PROBLEM, "takes up to 16 GiB"),
        # Locked memory matters with a GPU.
        (checks.check_locked_memory(8 * MiB, 64 * MiB, has_gpu=False), OK, "8 MiB"),
        (checks.check_locked_memory(8 * MiB, 64 * MiB, has_gpu=True), WARNING, "8 MiB"),
        (checks.check_locked_memory(GiB, 64 * MiB, has_gpu=True), OK, "1 GiB"),
        (checks.check_locked_memory(None, 64 * MiB, has_gpu=True), OK, "unlimited"),
        (checks.check_open_files(256), WARNING, "256"),
        (checks.check_open_files(1024), OK, "1024"),
        (checks.check_open_files(None), OK, "unlimited"),
        # A backend that is wanted must run.
        ([*checks.check_backends("auto", AVAILABLE)][-2], OK, "can run"),
        ([*checks.check_backends("auto", AVAILABLE)][-1], OK, "no NVIDIA driver"),
        ([*checks.check_backends("kvikio", AVAILABLE)][-2], OK, "can run"),
        ([*checks.check_backends("kvikio", AVAILABLE)][-1], PROBLEM, "no NVIDIA driver"),
        (file_system("ext4"), OK, "ext4"),
        (file_system("xfs", rotational=False), OK, "xfs"),
        (file_system("xfs", rotational=True), WARNING, "spinning"),
        (file_system("lustre"), WARNING, "other machines"),
        (file_system("tmpfs"), WARNING, "main memory"),
        (file_system("overlay"), WARNING, "container"),
        (file_system("unknown"), OK, "unknown"),
    ],
    ids=lambda value: value.name if isinstance(value, Check) else None,
)
def test_what_a_check_finds_is_judged_and_comes_with_advice_if_it_is_not_well(found, status, word):
    assert found.status == status
    assert word in found.found
    assert bool(found.advice) == (status != OK)


def tree(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


UNLIMITED = "9223372036854771712"
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("cgroup", "limits", "least"),
    [
        (None, {}, None),
        ("0::/a/b", {f"{V2}/a/b/memory.max": "max"}, None),
        ("0::/a/b", {f"{V2}/a/memory.max": "70", f"{V2}/a/b/memory.max": "100"}, 70),
        # in a container: the path is the host's, the mount is the container's
        ("0::/../other", {f"{V2}/memory.max": "60"}, 60),
        (
            "5:cpu:/x\n4:hugetlb,memory:/a",
            {
                f"{V1}/a/memory.limit_in_bytes": "50",
                f"{V1}/memory.limit_in_bytes": UNLIMITED,
                "sys/fs/cgroup/cpu/x/memory.limit_in_bytes": "1",
            },
            50,
        ),
        ("4:memory:/a", {f"{V1}/a/memory.limit_in_bytes": UNLIMITED}, None),
    ],
)
def test_the_least_limit_of_the_memory_cgroups_counts(cgroup, limits, least, tmp_path):
    files = limits if cgroup is None else {"proc/self/cgroup": cgroup, **limits}
    assert memory_cgroup_limit(tree(tmp_path, files)) == least


@pytest.mark.parametrize(
    ("cgroup", "limit", "statistics"),
    [
        ("0::/a", f"{V2}/a/memory.max", "file 7\nanon 30000000000\nshmem 1000000000\nanon_thp 5"),
        (
            "4:memory:/a",
            f"{V1}/a/memory.limit_in_bytes",
            "rss 9\nshmem 9\ntotal_cache 8\ntotal_rss 30000000000\ntotal_shmem 1000000000",
        ),
    ],
)
def test_what_other_processes_of_the_cgroup_have_is_not_available(
    cgroup, limit, statistics, tmp_path, monkeypatch
):
    memory = SimpleNamespace(available=50_000_000_000)
    monkeypatch.setattr(memory_limits.psutil, "virtual_memory", lambda: memory)
    own = psutil.Process().memory_info().rss
    root = tree(tmp_path, {"proc/self/cgroup": cgroup, limit: "40000000000"})
    assert 40_000_000_000 - 2 * own < available_bytes(root) < 40_000_000_000 - own // 2
    tree(tmp_path, {f"{limit.rpartition('/')[0]}/memory.stat": statistics})
    assert available_bytes(root) == 9_000_000_000
    memory.available = 5
    assert available_bytes(root) == 5


def test_huge_pages_that_are_off_are_worth_a_warning(tmp_path):
    file = tmp_path / "enabled"
    assert checks.check_huge_pages(file).status == OK  # a kernel without them
    for text, status in (("always [madvise] never\n", OK), ("always madvise [never]\n", WARNING)):
        file.write_text(text)
        found = checks.check_huge_pages(file)
        assert found.status == status
        assert (f"echo madvise > {file}" in found.advice) == (status == WARNING)


def test_a_system_without_limits_has_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    assert checks.resource_limit("RLIMIT_NOFILE") is None


def test_cufile_is_asked_for_only_with_an_nvidia_gpu(tmp_path, monkeypatch):
    assert checks.check_cufile(False).status == OK
    found = checks.check_cufile(True, tmp_path)
    assert found.status == WARNING  # neither kvikio nor the module
    assert "GPUDirect Storage" in found.advice
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: name)
    assert "not loaded" in checks.check_cufile(True, tmp_path).found
    tree(tmp_path, {"driver/nvidia-fs/version": "version: 2.17"})
    assert checks.check_cufile(True, tmp_path) == Check("cuFile", OK, "nvidia-fs 2.17")


def test_a_package_for_encryption_is_named_and_needed_only_where_tiers_are_encrypted(
    disk, doctor, monkeypatch
):
    wanted, missing = config(io={"encryption": True}), "needs the package cryptography"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "cryptography.exceptions", None)
        found = doctor(disk, "--json")["encryption"]
        assert (found["status"], found["advice"]) == (OK, "")
        assert f"is not needed: io.encryption: true {missing}" in found["found"]
        found = doctor(disk, "--json", status=1, config=wanted)["encryption"]
        assert (found["status"], missing in found["found"]) == (PROBLEM, True)
        assert "pip install offload-strategy[encryption]" in found["advice"]
    pytest.importorskip("cryptography", minversion="47")
    found = doctor(disk, "--json", config=wanted)["encryption"]
    assert (found["status"], found["found"]) == (OK, "the package cryptography can be used")


def test_an_nvidia_driver_that_torch_does_not_see_is_worth_a_warning(tmp_path):
    if torch.accelerator.is_available():
        assert checks.check_gpu().status == OK
        return
    assert checks.check_gpu(tmp_path) == Check("GPU", OK, "none: training on the CPU")
    (tmp_path / "nvidiactl").touch()
    assert checks.check_gpu(tmp_path).status == WARNING


# ---------------------------------------------------------------------------- paths
def test_a_directory_is_looked_at_in_every_respect_and_nothing_is_logged(disk, caplog):
    with caplog.at_level(logging.INFO, "offload_strategy"):
        found = [*check_path(disk, "nvme", direct=False)]
    names = ["file system", "unnamed files", "direct I/O", "space"]
    assert [check.name for check in found] == [f"{disk}: {name}" for name in names]
    # Buffered I/O was chosen.
    assert found[2] == Check(f"{disk}: direct I/O", OK, "switched off by io.direct: false")
    assert caplog.records == []


def test_unnamed_files_may_be_unknown(disk, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    found = [*check_path(disk, "nvme")][1]
    assert (found.name, found.status) == (f"{disk}: unnamed files", OK)
    assert "a file is made and loses its name at once" in found.found


def test_capacities_that_do_not_fit_alone_or_together_are_a_problem(disk, doctor):
    (found,) = check_path(disk, "nvme", capacity=1 << 60)
    assert (found.status, found.advice[:18]) == (PROBLEM, "Lower the capacity")
    capacity = shutil.disk_usage(disk).free * 2 // 3
    tier = {"kind": "ssd", "path": str(disk), "capacity": capacity}
    tiers = [{"name": name, **tier} for name in ("a", "b")]
    assert "capacities" not in doctor("--json", config=config(tiers=tiers[:1]))
    found = doctor("--json", status=1, config=config(tiers=tiers))["capacities"]
    assert found["status"] == "problem"
    assert "Free some space" in found["advice"]


def test_two_paths_on_one_file_system_are_worth_a_warning(disk, tmp_path):
    with loop_disk(tmp_path / "other", 16 * MiB) as other:
        assert [*check_devices([disk, other.directory])] == []
        (found,) = check_devices([disk, tmp_path, other.directory])
    assert found.status == WARNING
    assert str(other.directory) not in found.found


def test_a_device_with_data_and_a_read_only_file_system_are_problems(tmp_path):
    with loop_device(tmp_path / "empty.img", 16 * MiB) as device:
        found = [*check_path(device, "raw")]
        assert {check.status for check in found} == {OK}
        assert f"{device}: device" in [check.name for check in found]
    with loop_disk(tmp_path / "used", 16 * MiB) as disk:
        (used,) = check_path(disk.device, "raw")
        assert used.status == PROBLEM
        assert os.system(f"mount -o remount,ro {disk.directory}") == 0
        assert [*check_path(disk.directory, "nvme")][-1].status == PROBLEM
