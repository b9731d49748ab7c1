"""Devices: free memory, and what is said of those that are not there."""
from pathlib import Path

import pytest

from ms_accum.batch_size import devices, plan_micro_batch
from ms_accum.batch_size.devices import free_memory


def test_free_memory_minds_cgroups(tmp_path):
    """Of a group and those above it the tightest, in both versions; files that can be dropped count as free."""
    for name, text in {
            "a/b/memory.max": "max", "a/b/memory.current": "5",
            "a/memory.max": "1000", "a/memory.current": "300", "a/memory.stat": "anon 100\ninactive_file 200",
            "memory/c/memory.limit_in_bytes": str(2**63 - 4096), "memory/c/memory.usage_in_bytes": "5",
            "memory/c/memory.stat": "total_inactive_file 0",
            "memory/memory.limit_in_bytes": "700", "memory/memory.usage_in_bytes": "100",
            "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 50",
            "cgroup": "4:memory:/c\n3:cpuset:/\n0::/a/b\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sorted(devices.cgroups_leave(tmp_path / "cgroup", tmp_path))[:2] == [650, 900]
    assert devices.cgroups_leave(tmp_path / "none", tmp_path) == []
    (available,) = (int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()
                    if line.startswith("MemAvailable"))
    assert 0 < free_memory("CPU") <= 0.95 * 1024 * available


@pytest.mark.slow
def test_what_is_not_there_is_said(monkeypatch):
    for name in ("LD_LIBRARY_PATH", "ASCEND_HOME_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MS_SIMULATION_LEVEL", "1")
    assert free_memory("Ascend") == int(0.9 * 64 * 2**30)
    for device, message in (
            ("Ascend", r"a dry run needs CANN: ASCEND_HOME_PATH is not set, and .+; install CANN's toolkit"),
            ("GPU", r"the memory of GPU is unknown \(.+\); give a memory limit, or another device")):
        with pytest.raises(ValueError, match=message) as refused:
            plan_micro_batch(min, 4, device_target=device)
        assert "\n" not in str(refused.value)
