"""The names of system metrics, which are also the fields of system.jsonl, and what they mean.

The end of a name is its unit: _percent, _bytes, _bytes_s (bytes per second), _w (watts), _c (degrees Celsius);
other names are counts. A value that a host cannot measure is absent. Rates are means since the last sample.
"""

from __future__ import annotations

HOST_METRICS = {
    "cpu_percent": "use of all cores together; 100 is all of them",
    "memory_bytes": "memory that cannot be given to a new process",
    "memory_total_bytes": "memory of the host",
    "disk_bytes_s": "read and written, all disks",
    "network_bytes_s": "received and sent, all interfaces but the loopback",
}
RANK_METRICS = {
    "cpu_percent": "CPU use of the rank and its children; 100 is one core",
    "rss_bytes": "resident memory of the rank and its children; shared pages count for each of them",
    "processes": "the rank and its children",
    "gpu_percent": "time in which a kernel ran",
    "gpu_memory_bytes": "used memory of the GPU",
    "gpu_memory_total_bytes": "memory of the GPU",
    "gpu_power_w": "power",
    "gpu_temperature_c": "temperature",
    "gpu_throttle": "NVML's bits of the reasons why the clock is reduced",
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
