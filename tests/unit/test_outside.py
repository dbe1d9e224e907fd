"""deploy/outside.py: what a Proxmox host says of a container's memory."""

from __future__ import annotations

import pytest

from deploy import budget, outside
from deploy.host import Local, Result

V2 = {"memory.max": "1000", "memory.current": "700", "inactive_file": "200", "active_file": "50"}
V1 = {
    "memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "700", "total_inactive_file": "200",
    "total_active_file": "50", "inactive_file": "1", "active_file": "1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("told", "room"),
    [
        (V2, 550),
        (V1, 550),
        ({**V2, "memory.current": "2000"}, 0),
        ({"memory.current": "700"}, None),  # memory.max says "max"
        ({**V1, "memory.limit_in_bytes": "9223372036854771712"}, None),
        ({}, None),
    ],
)
def test_a_limit_leaves_what_is_not_used_and_what_the_kernel_would_drop(told, room):
    assert outside.room(told) == room


class Proxmox(Local):
    said = b""

    def run(self, argv, **more):
        return Result(0, self.said, b"")


def test_facts_of_a_container_count_its_limit_and_what_its_host_has():
    host = Proxmox()
    host.said = b"memory.max 9000\nmemory.current 1000\nactive_file 0\ninactive_file 0\navailable 20\n"
    facts = {"memory": {"total": 1, "available": 50_000, "room": None}}
    outside.add(host, 200, facts)
    assert facts["memory"] == {"total": 1, "available": 20 * 1024, "room": 8000}
    short = budget.shortages({**facts, "shm": {"root": "/s", "is_tmpfs": True}}, "train", 9000)
    assert [one.sentence for one in short] == [
        "container 200 (train) has 8.0 kB of memory free, but the weights need 9.0 kB: 1.0 kB too little"
    ]
    assert "pct set 200 --memory" in budget.more_memory(facts)
