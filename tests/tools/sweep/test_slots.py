"""Cores and GPUs, taken and given back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.tools.sweep.slots import Grant, Machine, Need, Slots, needed
from tests.fixtures import make_config


@given(
    st.integers(1, 8),
    st.integers(0, 4),
    st.integers(1, 4),
    st.lists(st.one_of(st.builds(Need, cores=st.integers(1, 4)), st.builds(Need, gpus=st.integers(1, 3)), st.none())),
)
def test_grants_never_exceed_the_machine(cores, gpus, most, events):
    machine = Machine(cores, tuple(map(str, range(gpus))))
    slots, out = Slots(machine, most), list[Grant]()
    for wanted in events:
        if wanted is None:
            if out:
                slots.give_back(out.pop(0))
        elif (grant := slots.take(wanted)) is not None:
            assert (grant.cores, len(grant.gpus)) == (wanted.cores, wanted.gpus)
            out.append(grant)
        else:  # refused only if it does not fit
            used = sum(grant.cores for grant in out), sum(len(grant.gpus) for grant in out)
            assert len(out) == most or used[0] + wanted.cores > cores or used[1] + wanted.gpus > gpus
        assert sum(grant.cores for grant in out) <= cores
        taken = [gpu for grant in out for gpu in grant.gpus]
        assert len(taken) == len(set(taken)) <= gpus
        assert len(out) <= most
        assert slots.full == (len(out) == most or sum(g.cores for g in out) == cores or 0 < gpus == len(taken))


def test_need_of_a_trial(tmp_path):
    cpu, gpu = Machine(8), Machine(8, ("0", "1"))
    config = make_config(tmp_path, ["launch.nproc=2", "launch.threads=3", "runtime.device=auto"])
    assert needed(config, cpu) == Need(cores=6)
    assert needed(config, gpu) == Need(gpus=2)
    assert needed(make_config(tmp_path, ["launch.nproc=2"]), gpu) == Need(cores=2)  # runtime.device=cpu
    assert needed(make_config(tmp_path, ["launch.nproc=64", "launch.engine=slurm"]), cpu) == Need()
    dask = ["launch.nproc=2", "launch.engine=dask"]
    assert needed(make_config(tmp_path, dask), cpu) == Need(cores=2)  # a cluster on this machine, for this run only
    assert needed(make_config(tmp_path, [*dask, "launch.dask.scheduler=tcp://10.0.0.1:8786"]), cpu) == Need()


def test_need_beyond_the_machine_is_explained():
    assert Need(cores=2).lacks(Machine(2)) == ""
    assert "3 cores needed" in Need(cores=3).lacks(Machine(2))
    assert "1 GPU needed, but the machine has 0" in Need(gpus=1).lacks(Machine(2))


def test_this_machine():
    machine = Machine.this(None)
    assert machine.cores >= 1
