"""Machinery that breaks things on purpose, and checks that nothing is lost: `make faults` runs all of it and writes
benchmarks/FAULTS.md, tests/test_faults.py a share.

    forks.py        a child process with a job, to be killed
    jobs.py         what is done with data and runs
    operations.py   every operation of a job on the disk fails in turn, in each way; disks that are full, or gone
    kills.py        SIGKILL in the middle of runs, which then resume
    memory.py       memory ends at each allocation in turn
    stagers.py      eight processes stage the same at once
    mutations.py    damaged and hostile files of every format that is read
    __main__.py     the parts, their seeds and totals
"""
