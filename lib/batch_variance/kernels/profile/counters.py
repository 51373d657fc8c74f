"""Which hardware counters are read, by the names that Nsight Compute gives them.

Names differ between versions and chips: what a role may be called stands here in order, and what a machine lacks is
left out of its profile.
"""

TIME = "gpu__time_duration.sum"
PEAK = ".avg.pct_of_peak_sustained_elapsed"

# role: its counters, the first that is there is read. Shares are percent of the device's peak.
ROLES = {
    "time": (TIME,),
    "DRAM": ("dram__throughput" + PEAK, "gpu__dram_throughput" + PEAK),
    "L2": ("lts__throughput" + PEAK,),
    "L1": ("l1tex__throughput.avg.pct_of_peak_sustained_active",),
    "tensor pipe": (
        "sm__pipe_tensor_cycles_active" + PEAK,
        "sm__pipe_tensor_op_hmma_cycles_active" + PEAK,
        "sm__inst_executed_pipe_tensor" + PEAK,
    ),
    "issue slots": ("sm__issue_active" + PEAK, "sm__inst_issued" + PEAK, "sm__inst_executed" + PEAK),
    "multiprocessor": ("sm__throughput" + PEAK,),
    "warps active": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "cycles active": ("sm__cycles_active.avg",),
    "cycles active, most": ("sm__cycles_active.max",),
    "cycles active, least": ("sm__cycles_active.min",),
    "cycles elapsed": ("sm__cycles_elapsed.max",),
    "clock": ("sm__cycles_elapsed.avg.per_second",),
    "bytes read": ("dram__bytes_read.sum",),
    "bytes written": ("dram__bytes_write.sum",),
    "L2 bytes": ("lts__t_bytes.sum",),
    "warp-group products": ("sm__inst_executed_pipe_tensor_op_gmma.sum",),
    "warp products": ("sm__inst_executed_pipe_tensor_op_hmma.sum",),
    "instructions": ("smsp__inst_executed.sum", "sm__inst_executed.sum"),
    "local loads": ("smsp__inst_executed_op_local_ld.sum", "smsp__sass_inst_executed_op_local_ld.sum"),
    "local stores": ("smsp__inst_executed_op_local_st.sum", "smsp__sass_inst_executed_op_local_st.sum"),
    "bank conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
    "shared wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",),
}

# Read by section, whose counters every version of the tool knows by itself.
SECTIONS = ("LaunchStats", "Occupancy", "WarpStateStats")
LAUNCH = {
    "blocks": "launch__grid_size",
    "threads": "launch__block_size",
    "registers": "launch__registers_per_thread",
    "shared bytes, dynamic": "launch__shared_mem_per_block_dynamic",
    "shared bytes, static": "launch__shared_mem_per_block_static",
    "waves": "launch__waves_per_multiprocessor",
}
RESIDENT = "launch__occupancy_limit_"  # blocks that a multiprocessor holds at once, by what limits them
STALLS = ("smsp__average_warps_issue_stalled_", "_per_issue_active.ratio")
NOT_STALLS = ("selected", "not selected")  # a warp that issues, and one that could but another did
PROCESSORS = "multiprocessors"


def wanted(existing: set[str] | None) -> tuple[list[str], list[str]]:
    """(counters to ask for, roles that this machine has no counter for). existing: base names, such as
    ``dram__bytes_read``, or None where they are not known, when the first name of each role is taken on trust."""
    found, missing = [], []
    for role, names in ROLES.items():
        there = [name for name in names if existing is None or name.partition(".")[0] in existing]
        found += there[:1]
        if not there:
            missing.append(role)
    return found, missing


def kept(name: str) -> bool:
    """Whether a counter of the tool's output is recorded."""
    named = {one for names in ROLES.values() for one in names} | set(LAUNCH.values())
    return name in named or name.startswith(RESIDENT) or stall_of(name) is not None


def stall_of(name: str) -> str | None:
    """The reason, such as "long scoreboard", of a warp-state counter; None for another counter."""
    head, tail = STALLS
    if not name.startswith(head) or not name.endswith(tail) or "_not_issued" in name:
        return None
    return name[len(head) : -len(tail)].replace("_", " ")


def value_of(role: str, values) -> float | None:
    """The role's value among a launch's recorded counters (a mapping from name), or None where none was read."""
    names = ROLES.get(role) or (LAUNCH[role],)
    return next((float(values[name]) for name in names if name in values), None)
