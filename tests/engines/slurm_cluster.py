"""A Slurm cluster of Debian's packages on this machine: munged, slurmctld and two slurmd, without init and /etc/slurm.

Every daemon is a child of the test's process and keeps its files in one folder; all processes that came of them carry
that folder's slurm.conf in their environment, and only such are ever looked at or signalled.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.end_to_end.processes import environment_of, wait_until
from tests.ranks import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "setpriv")
NODES = ("n0", "n1")

# cred_expire is also what a requeued job waits before it starts again; 120 s if nothing is said. Nothing else shortens
# it: a job whose StartTime is set to now is ended at once, for nodes remember that its credential was revoked.
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
SlurmdTimeout=12
KillWait=5
MailProg=/bin/true
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes={names} Default=YES MaxTime=60 PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes={names} MaxTime=60 PriorityTier=2 PreemptMode=OFF
"""


def missing() -> list[str]:
    """Requirements of a cluster that this machine lacks."""
    absent = [f"the program {name}" for name in PROGRAMS if shutil.which(name) is None]
    return absent + (["root's rights"] if os.geteuid() != 0 else [])


class Cluster:
    """Use ``started``. ``environ`` is what a user of it has in the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder, folder / "slurm.conf"
        self.environ = {"SLURM_CONF": str(self.conf)}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        host = socket.gethostname().partition(".")[0]
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 RealMemory=1000"
            for name in NODES
        ]
        self._text = CONF.format(host=host, controller_port=free_port(), folder=self.folder,
                                 nodes="\n".join(lines), names=",".join(NODES))  # fmt: skip
        self.conf.write_text(self._text)
        places = [f"--{what}-file={self.folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        self._daemon("munged", "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *places)
        wait_until((self.folder / "munge.socket").exists, 10, "munged's socket")
        self._daemon("slurmctld", "slurmctld", "-D")
        for name in NODES:
            self.start_node(name)
        wait_until(lambda: self.states() == dict.fromkeys(NODES, "idle"), 30, f"idle nodes; see {self.folder}/*.log")

    def _daemon(self, name: str, *command: str) -> None:
        """Start it; it does not outlive this process, however that ends."""
        with open(self.folder / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", *command], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env=os.environ | self.environ, start_new_session=True,
            )  # fmt: skip

    def reconfigure(self, **settings: int) -> None:
        """With other values of slurm.conf than above, or these again."""
        text = self._text
        for name, value in settings.items():
            text, count = re.subn(rf"^{name}=.*", f"{name}={value}", text, flags=re.M)
            assert count == 1, name
        self.conf.write_text(text)
        self.ask("scontrol", "reconfigure")

    def start_node(self, name: str) -> None:
        self._daemon(name, "slurmd", "-D", "-N", name)

    def lose_node(self, name: str) -> None:
        """As when its power fails: slurmd and all that it started are gone at once."""
        daemons = [self._daemons[name].pid, *self._stepds(name)]
        own = [pid for pid, environ in self.processes().items() if environ.get("SLURMD_NODENAME") == name]
        script, *others = sorted(own, key=_begun)
        # Nobody is left for a moment who would tell of another's end: not the job's script, and not the process with
        # which srun watches itself, to have Slurm kill the step on all nodes.
        for pid in (*daemons, script, *reversed(others)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._daemons.pop(name).wait()

    def _stepds(self, name: str) -> list[int]:
        """slurmstepd processes of a node, which are not below their slurmd: told by the log that they opened."""
        found = []
        for pid in self.processes():
            with suppress(OSError):
                opened = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
                if any(f"/slurmd-{name}.log" in path for path in opened):
                    found.append(pid)
        return found

    def ask(self, *command: str, timeout_s: float = 15) -> str:
        """The output of a Slurm command."""
        done = subprocess.run(
            command, env=os.environ | self.environ, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def states(self) -> dict[str, str]:
        with suppress(AssertionError):
            return dict(line.split() for line in self.ask("sinfo", "-h", "-N", "-o", "%N %t").splitlines())
        return {}

    def job(self, number: str) -> dict[str, str]:
        """The fields that ``scontrol show job`` prints."""
        words = self.ask("scontrol", "show", "job", "-o", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def processes(self) -> dict[int, dict[str, str]]:
        """{process id: environment} of all that came of this cluster, and of nothing else."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        found = {pid: environment_of(pid) for pid in pids}
        own = {pid: environ for pid, environ in found.items() if environ.get("SLURM_CONF") == str(self.conf)}
        own.pop(os.getpid(), None)
        return own

    def stop(self) -> None:
        deadline = time.monotonic() + 15
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for daemon in self._daemons.values():
                daemon.wait(5)
            time.sleep(0.05)


def _begun(pid: int) -> tuple[int, int]:
    """An order in which processes were started."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]), pid  # ticks since boot
    except OSError:
        return 0, pid


@contextmanager
def started(folder: Path) -> Iterator[Cluster]:
    """A cluster of two nodes with idle CPUs; nothing of it is left when the body ends."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
