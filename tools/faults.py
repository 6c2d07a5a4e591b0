"""Faults injected for real into whole commands on a tiny model: how each command ends, and what is lost.

    python -m tools.faults [--seed N] [--moments N] [--disks N] [--folders N] [--commands run,qat]

Signals come at moments that are uniform over the undisturbed duration, to the main process or the whole
group; disks are tmpfs of random sizes, so it needs root. After each fault the same command must end as the
undisturbed one, with the same files, byte for byte but for `MAY_DIFFER`. Exits with 1 where one does not.
"""

import argparse
import importlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tests.integration import tiny

from qdqbench.cli.app import program
from qdqbench.quantize.utils.system import process as this
from qdqbench.quantize.utils.system.early import watch_early

ON = "--model ../given/model --task sst2 --data ../given/data"
FEW = f"{ON} --set calibration.samples=32"
STEPS = "--set qat.max_steps=4 --set qat.num_evals=2"
SHORT = "--max-steps 4 --num-evals 2 --seeds 1"
FAST = "--samples 32 --trials 8 --batch 1 --length 8"
ORT = "--backend onnxruntime"
COMMANDS = {  # words, and the share of moments: cheap commands have more
    "run": (f"run int8-linears {FEW} {ORT} --out out", 16),
    "qat": (f"qat int8-attention-qat {FEW} {ORT} {STEPS} --out out", 8),
    "search": (f"search int8-linears {FEW} --samples 32 --trials 2 --speed int8-share --out out", 6),
    "auto": (f"auto bert-int8-linears {FEW} {ORT} {FAST} --out out", 8),
    "compare-calibration": (f"compare-calibration int8-linears {FEW} --samples 16 --out out", 4),
    "sensitivity": (f"sensitivity int8-linears {FEW} --samples 16 --out out", 10),
    "compare": ("compare run other --out out", 48),
    "export-triton": ("export-triton run --out out", 45),
    "deploy": ("deploy run --out out", 45),
    "study": (f"study bert-int8-attention-qat {FEW} {STEPS} {SHORT} --out out", 10),
}
OTHER = f"run bert-fp16 {FEW} {ORT} --out other"
SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
STATUS = {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}
BEFORE = (-signal.SIGINT, -signal.SIGTERM, 70)  # of Python, or of this program between fork and exec
REFUSED = {"export-triton": "is a file or holds files"}  # what does not write over what is finished
RESUMED = "(resumed after step|no whole checkpoint was left|checkpoint .* is damaged)"
MAY_DIFFER = {  # in any text file: pattern -> what it is
    r'"(created|since)": "[^"]+"|[-\d]{10}[T ][\d:]{8}(\+00:00| UTC)': "dates",
    r'"\w*(seconds|_s|_s_\w+)": [-\d.e]+|(?<=[ >|])[\d.]+ (ms|s|min|h)\b|width: [\d.]+%': "durations",
    r'"samples_per_second": [\d.]+|samples/s</th><td>[\d,.]+|samples/s \| [\d,.]+': "rates",
    r'"(peak_rss_bytes|memory_bytes|resident_bytes)": \d+|(?<=[ >|])[\d.]+ [kMG]?B\b': "memory",
    r'"[\w./]*(engine|training).json": "[0-9a-f]{64}"|"key": "[0-9a-f]{64}"': "hashes of such files",
    r'"reused": (true|false)| <span class="soft small">\(reused\)</span>| \(\(reused\)\)': "what is reused",
    rf'(,\s*)?"{RESUMED}[^"\n]*"|## Notes\n\n(- {RESUMED}.*\n)+\n': "and resumed",
    r"(?<=\[)\s+(?=\])": "of which nothing is left",
    rf"<p>{RESUMED}.*</p>\s*|(?m:^{RESUMED}.*\n\n)": "in sections",
    rf'\s*<div class="notes soft small">\s*<ul>\s*(<li>{RESUMED}.*</li>\s*)+</ul>\s*</div>': "on pages",
}
INTERRUPTED = "interrupted; .*the same command (resumes|starts from scratch)|interrupted before it began; .*"
OTHERS = (".ses", "qdqbench-cpu-0.lock")  # temporary files that stay: of ONNX Runtime, and of timers
PROGRESS = re.compile(r"\d\d:\d\d:\d\d .*")
PAGE = 4096
PRELOADED = (
    "datasets modelopt.torch.quantization optuna qdqbench.eval.runs.study qdqbench.eval.selection.auto.run"
)
NOBODY = (1 << 22) - 1  # a process id that is free
SLACK_S = 90.0  # beyond ten times the undisturbed duration, after which a command hangs


@dataclass
class Ended:
    status: int
    lines: list[str]  # of stderr, without progress
    seconds: float

    def complaints(self, status: int, pattern: str) -> list[str]:
        """Return what is wrong with how a command ended that had to fail with one sentence."""
        if self.status in BEFORE and "qdqbench" not in "".join(self.lines):
            return []  # Python itself was starting
        told = len(self.lines) == 1 and re.fullmatch(f"qdqbench: .*({pattern}).*", self.lines[0])
        wrong = [] if self.status == status else [f"exit status {self.status} instead of {status}"]
        wrong += [] if told else [f"stderr: {' / '.join(self.lines)[-600:]}"]
        return wrong + (["unexpected failure"] if "unexpected failure" in " ".join(self.lines) else [])


@dataclass
class Bench:
    """One command in a folder of its own, and what it makes undisturbed."""

    name: str
    work: Path
    whole: dict[str, bytes] = field(default_factory=dict)
    used: int = 0  # bytes of a disk
    undisturbed: Ended = field(default_factory=lambda: Ended(0, [], 60.0))

    @property
    def case(self) -> Path:
        return self.work / "case"

    @property
    def temporary(self) -> Path:
        return self.work / "tmp"

    def reset(self) -> None:
        empty(self.case)
        empty(self.temporary)
        words = COMMANDS[self.name][0].split()
        for given in {"run", "other"} & {*words[1:]}:
            shutil.copytree(self.work / "given" / given, self.case / given)

    def start(self, words: str = "", *, warm: bool = False) -> "Process":
        return Process(self, (words or COMMANDS[self.name][0]).split(), warm=warm)

    def measure(self) -> None:
        self.reset()
        self.undisturbed, self.whole, self.used = self.start().wait(), self.read(), used(self.case)

    def read(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.case)): content(path)
            for path in sorted(self.case.rglob("*"))
            if path.name != ".lock" and (path.is_file() or not any(path.iterdir()))
        }

    def again(self) -> list[str]:
        """Run the same command, and return what differs from the undisturbed one."""
        empty(self.temporary)  # what a killed process leaves there is the system's
        finished = REFUSED.get(self.name) if self.read() == self.whole else None
        ended = self.start(warm=True).wait()
        if finished is not None and ended.status == 1:
            return ended.complaints(1, finished) + differences(self.whole, self.read()) + self.left()
        wrong = [] if ended.status == self.undisturbed.status else [f"then: {ended.status} {ended.lines}"]
        return wrong + differences(self.whole, self.read()) + self.left()

    def left(self) -> list[str]:
        """Return what is left of temporary files; a killed process may leave them until the next."""
        paths = [*self.case.rglob("*.tmp"), *self.case.rglob(".lock.json"), *self.temporary.iterdir()]
        return [f"left: {path.relative_to(self.work)}" for path in paths if path.name not in OTHERS]


class Process:
    """A command that works; a warm one has the libraries of this process, and starts sooner."""

    def __init__(self, bench: Bench, words: list[str], *, warm: bool) -> None:
        self.bench, self.started, self.status = bench, time.monotonic(), None
        self.told = bench.work / f"stderr-{time.monotonic_ns()}"
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._become(words, warm)
            finally:
                os._exit(70)
        while os.getpgid(self.pid) != self.pid:  # it has no group yet
            time.sleep(0.001)

    def _become(self, words: list[str], warm: bool) -> None:
        os.setsid()
        os.chdir(self.bench.case)
        os.environ["TMPDIR"], tempfile.tempdir = str(self.bench.temporary), None
        for number, path in enumerate((os.devnull, os.devnull, self.told)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
        if not warm:
            os.execv(sys.executable, [sys.executable, "-m", "qdqbench", *words])
        watch_early()
        sys.argv = ["qdqbench", *words]
        program()

    def runs(self) -> bool:
        if self.status is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.status = os.waitstatus_to_exitcode(ended[1])
        return self.status is None

    def sleep(self, seconds: float) -> bool:
        """Wait until so long after the start; whether the process still runs."""
        while self.runs() and (left := self.started + seconds - time.monotonic()) > 0:
            time.sleep(min(left, 0.02))
        return self.runs()

    def wait(self) -> Ended:
        if hangs := self.sleep(10 * self.bench.undisturbed.seconds + SLACK_S):
            os.kill(self.pid, signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        seconds = time.monotonic() - self.started
        lines = self.told.read_text(errors="replace").splitlines() if self.told.exists() else []
        self.told.unlink(missing_ok=True)
        lines = [line for line in lines if not PROGRESS.fullmatch(line)] + ["it hung"] * hangs
        return Ended(self.status, lines + self._orphans(), seconds)

    def _orphans(self) -> list[str]:
        def alive() -> list[psutil.Process]:
            found = []
            for process in psutil.process_iter():
                with suppress(psutil.Error, ProcessLookupError):
                    if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
            return found

        until = time.monotonic() + 10
        while (left := alive()) and time.monotonic() < until:
            time.sleep(0.2)
        for process in left:
            process.kill()
        return [f"a child is alive: {process.name()}" for process in left]


def empty(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def used(folder: Path) -> int:
    """Return how many bytes of a tmpfs a folder takes."""
    return sum(-(-path.stat().st_size // PAGE) * PAGE for path in folder.rglob("*") if path.is_file())


def content(path: Path) -> bytes:
    """Return the bytes of a file without what may differ."""
    if path.is_dir():
        return b""
    data = path.read_bytes()
    with suppress(UnicodeDecodeError):
        text = data.decode()
        for pattern in MAY_DIFFER:
            text = re.sub(pattern, "", text)
        data = text.encode()
    return data


def differences(whole: dict[str, bytes], found: dict[str, bytes]) -> list[str]:
    """Return which files are missing, too many, or other than they should be, with the first other line."""
    wrong = [f"lost: {name}" for name in whole if name not in found]
    wrong += [f"left: {name}" for name in found if name not in whole]
    for name, data in whole.items():
        if (other := found.get(name, data)) != data:
            pairs = zip(data.splitlines(), other.splitlines(), strict=False)
            was, became = next((pair for pair in pairs if pair[0] != pair[1]), (data[-60:], other[-60:]))
            wrong.append(f"other: {name}: {str(was)[-160:]} -> {str(became)[-160:]}")
    return wrong


@contextmanager
def disk(folder: Path, size: int) -> Iterator[Callable[[str], object]]:
    """Mount a small disk on a folder, and yield what mounts it with other options."""

    def remount(options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)

    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield remount
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def send_signal(bench: Bench, draw: random.Random) -> tuple[str, list[str]] | None:
    """Kill or interrupt; after a kill the holder of the lock may get the id of a process after a reboot."""
    number, group = draw.choice(SIGNALS), draw.random() < 0.5
    holder = draw.choice((None, os.getpid(), NOBODY))
    bench.reset()
    process = bench.start()
    if not process.sleep(draw.uniform(0, bench.undisturbed.seconds)):
        bench.undisturbed.seconds = process.wait().seconds
        return None
    (os.killpg if group else os.kill)(process.pid, number)
    ended = process.wait()
    what = f"{number.name} to the {'group' if group else 'main process'}"
    if ended.status == bench.undisturbed.status:
        return None
    if number != signal.SIGKILL:
        wrong = ended.complaints(STATUS[number], INTERRUPTED)
        return what, wrong + bench.left() + bench.again()
    wrong = [line for line in ended.lines if "alive" in line]
    for path in bench.case.rglob(".lock.json") if holder else ():
        path.write_text(re.sub(r'"process": \d+', f'"process": {holder}', path.read_text()))
        what = f"SIGKILL, lock with the id of {'no' if holder == NOBODY else 'another'} process"
    return what, wrong + bench.again()


def fill_disk(bench: Bench, draw: random.Random) -> tuple[str, list[str]]:
    """Give the output, or temporary files, a disk that is too small; then make room."""
    output = draw.random() < 0.8
    place = bench.case if output else bench.temporary
    bench.reset()
    least = used(place)
    most = bench.used if output else 1 << 15
    with disk(place, round(least + draw.random() * (most - least)) + PAGE) as remount:
        bench.reset()
        ended = bench.start(warm=True).wait()
        what = f"full disk for {'the output' if output else 'temporary files'}"
        if ended.status == bench.undisturbed.status:
            return f"{what}: it fitted", differences(bench.whole, bench.read())
        wrong = ended.complaints(1, "no space left|room") + bench.left()
        remount(f"size={1 << 30}")
        return what, wrong + bench.again()


def refuse_writes(bench: Bench, draw: random.Random) -> tuple[str, list[str]]:
    """Make the folder read-only before the command, and again when it is finished."""
    with disk(bench.case, 1 << 30) as remount:
        bench.reset()
        before = bench.read()
        remount("ro")
        wrong = bench.start(warm=True).wait().complaints(1, "[Rr]ead-only")
        wrong += differences(before, bench.read())
        remount("rw")
        wrong += bench.again()
        remount("ro")
        ended = bench.start(warm=True).wait()
        if ended.status != bench.undisturbed.status:
            wrong += ended.complaints(1, "[Rr]ead-only|holds files")
        return "read-only folder", wrong + differences(bench.whole, bench.read())


def remove_folder(bench: Bench, draw: random.Random) -> tuple[str, list[str]] | None:
    """Move a folder away in the middle, and bring back what was given."""
    bench.reset()
    process = bench.start(warm=True)
    runs = process.sleep(draw.uniform(0, bench.undisturbed.seconds))
    folders = sorted(path for path in bench.case.iterdir() if path.is_dir())
    if not runs or not folders:
        process.wait()
        return None
    gone = draw.choice(folders)
    gone.rename(bench.work / "gone")
    ended = process.wait()
    if given := gone.name != "out":
        shutil.rmtree(gone, ignore_errors=True)
        (bench.work / "gone").rename(gone)
    else:
        shutil.rmtree(bench.work / "gone")
    if ended.status != bench.undisturbed.status:
        wrong = ended.complaints(1, ".{20,}")
    else:
        wrong = differences(bench.whole, bench.read())
    return f"vanished folder of the {'input' if given else 'output'}", wrong + bench.again()


def start_second(bench: Bench, draw: random.Random) -> tuple[str, list[str]]:
    """Run the same command twice at the same time: one works, and the other says so or works after it."""
    bench.reset()
    first = bench.start(warm=True)
    first.sleep(draw.uniform(0, bench.undisturbed.seconds))
    second = bench.start(warm=True).wait()
    both = [first.wait(), second]
    losers = [ended for ended in both if ended.status != bench.undisturbed.status]
    wrong = ["none works"] if len(losers) == 2 else []
    wrong += [each for ended in losers for each in ended.complaints(1, "is in use|holds|exists|is not empty")]
    return "second process", wrong + differences(bench.whole, bench.read()) + bench.left()


FOLDERS = (refuse_writes, remove_folder, start_second)
Record = tuple[str, str, list[str]]  # command, fault, what is wrong
Fault = Callable[[Bench, random.Random], tuple[str, list[str]] | None]


def preload() -> None:
    """Import once what all commands import."""
    this.use_passive_wait()
    this.disable_malloc_trim()
    for name in PRELOADED.split():
        importlib.import_module(name)


def prepare(work: Path) -> None:
    """Make the model, its data and two finished runs."""
    given, bench = work / "given", Bench("run", work)
    given.mkdir(parents=True)
    tiny.LAYERS = 1
    tiny.write_data(given / "data", "sst2")
    tiny.write_model(given / "model", "sst2")
    bench.reset()
    for name, words in (("run", COMMANDS["run"][0].replace("--out out", "--out run")), ("other", OTHER)):
        if (ended := bench.start(words).wait()).status:
            raise SystemExit(f"{words}: {ended}")
        (bench.case / name).rename(given / name)


def plan(names: list[str], moments: int, disks: int, folders: int) -> list[tuple[str, Fault]]:
    """Return faults and their commands: moments by the shares of commands, the others in turn."""
    shares = [name for name in names for _ in range(COMMANDS[name][1])]
    found = [(shares[turn * len(shares) // moments], send_signal) for turn in range(moments)]
    found += [(shares[turn * len(shares) // disks], fill_disk) for turn in range(disks)]
    return found + [
        (names[turn % len(names)], FOLDERS[(turn + turn // len(names)) % 3]) for turn in range(folders)
    ]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--moments", type=int, default=200)
    asked.add_argument("--disks", type=int, default=50)
    asked.add_argument("--folders", type=int, default=30)
    asked.add_argument("--minutes", type=float, default=600, help="after which no fault is injected")
    asked.add_argument("--commands", default=",".join(COMMANDS))
    asked.add_argument("--work", type=Path, default=Path("build/faults"))
    options = asked.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # ModelOpt pickles sets in their order
        os.execve(sys.executable, sys.orig_argv, os.environ | {"PYTHONHASHSEED": "0"})
    start, work, records = time.monotonic(), options.work.resolve(), list[Record]()
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "HF_HUB_OFFLINE": "1"}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    prepare(work)
    preload()
    names = options.commands.split(",")
    benches = {name: Bench(name, work) for name in names}
    for bench in benches.values():
        bench.measure()
        print(f"{bench.name}: {bench.undisturbed.seconds:.1f} s undisturbed", flush=True)
    faults = plan(names, options.moments, options.disks, options.folders)
    random.Random(options.seed).shuffle(faults)
    for number, (name, fault) in enumerate(faults):
        if time.monotonic() - start > 60 * options.minutes:
            break
        draw = random.Random(f"{options.seed} {number}")
        while (found := fault(benches[name], draw)) is None:
            print(f"{number} {name}: ended before the fault; drawn again", flush=True)
        records.append((name, *found))
        passed = f"{time.monotonic() - start:.0f} s"
        print(f"{number} {name}, {passed}: {found[0]}", *found[1], sep="\n    ", flush=True)
    print_table(records)
    sys.exit(any(wrong for _, _, wrong in records))


def print_table(records: list[Record]) -> None:
    """Print what was injected, how often, in what, and what was lost."""
    print("\n| fault | times | commands | not as undisturbed |\n|---|---|---|---|")
    for fault in sorted({fault for _, fault, _ in records}):
        cases = [(name, wrong) for name, each, wrong in records if each == fault]
        counts = Counter(name for name, _ in cases)
        among = ", ".join(f"{name} {counts[name]}" for name in COMMANDS if name in counts)
        print(f"| {fault} | {len(cases)} | {among} | {sum(bool(wrong) for _, wrong in cases)} |")
    lost = sum(bool(wrong) for _, _, wrong in records)
    print(f"| all | {len(records)} | | {lost} |", flush=True)


if __name__ == "__main__":
    main()
