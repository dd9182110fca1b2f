"""The names of system metrics, which are also the fields of system.jsonl, and what they mean.

The end of a name is its unit: _percent, _bytes, _bytes_s (bytes per second), _w (watts), _c (degrees Celsius), _mhz;
other names are counts. A value that a host cannot measure is absent. Rates are means since the last sample.
"""

from __future__ import annotations

HOST_METRICS = {
    "cpu_percent": "use of all cores together; 100 is all of them",
    "cores": "cores of the host",
    "iowait_percent": "time in which cores were idle because a process waited for a disk",
    "memory_bytes": "memory that cannot be given to a new process",
    "memory_total_bytes": "memory of the host",
    "swap_bytes": "memory that is swapped out",
    "shm_bytes": "use of /dev/shm",
    "shm_total_bytes": "size of /dev/shm",
    "disk_bytes": "use of the file system of the workers' scratch folder",
    "disk_total_bytes": "its size",
    "disk_read_bytes_s": "of all disks",
    "disk_write_bytes_s": "of all disks",
    "network_receive_bytes_s": "of all interfaces but the loopback",
    "network_send_bytes_s": "of all interfaces but the loopback",
    "open_files": "of all processes",
}
RANK_METRICS = {
    "cpu_percent": "CPU use of the rank and its children; 100 is one core",
    "cpu_wait_percent": "time in which the rank's main thread was ready to run, and had no core",
    "rss_bytes": "resident memory of the rank and its children; shared pages count for each of them",
    "processes": "the rank and its children",
    "open_files": "of the rank and its children",
    "read_bytes_s": "of the rank and its children from disks",
    "write_bytes_s": "of the rank and its children to disks",
    "gpu_percent": "time in which a kernel ran",
    "gpu_memory_bytes": "used memory of the GPU",
    "gpu_memory_total_bytes": "memory of the GPU",
    "gpu_power_w": "power",
    "gpu_temperature_c": "temperature",
    "gpu_clock_mhz": "clock of the multiprocessors",
    "gpu_clock_max_mhz": "its maximum",
    "gpu_throttle": "NVML's bits of the reasons why the clock is reduced",
    "gpu_ecc_errors": "memory errors that could not be corrected since the driver was loaded",
    "gpu_processes": "processes that use the GPU",
    "gpu_pcie_receive_bytes_s": "data to the GPU",
    "gpu_pcie_send_bytes_s": "data from the GPU",
}
# NVML's reasons for a reduced clock that mean a problem. Idle, a clock set by the user, and sync boost are none.
THROTTLE_REASONS = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake of the power supply",
}


def throttle_reasons(bits: float) -> list[str]:
    """Return the texts of the reasons in a value of gpu_throttle (bits)."""
    return [text for bit, text in THROTTLE_REASONS.items() if int(bits) & bit]
