"""Runs the suites of one lane of ci/suites.toml and holds each to its share of time.

With --dry-run, a lane that needs a GPU runs what its suites do without one, and names the rest.
Needs only the standard library, because the first suite of the CPU lane is the set-up itself.
A suite fails when its command fails or takes longer than its share; the others still run, unless
the failed one is `required` by them. Exits non-zero when any suite failed.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Suite:
    """One entry of ci/suites.toml; `files` are appended to its command, `dry` replaces it."""

    name: str
    minutes: float
    run: list[str]
    env: dict[str, str] = field(default_factory=dict)
    required: bool = False
    files: int = 0
    dry: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """How a suite ended: `failure` is None or a sentence."""

    suite: Suite
    seconds: float
    failure: str | None


def suites_of(lane: str, text: str) -> list[Suite]:
    """The suites of a lane; raises ValueError naming the lanes there are."""
    lanes = tomllib.loads(text)
    if lane not in lanes:
        raise ValueError(f"ci/suites.toml has no lane {lane!r}; it has {', '.join(lanes)}")
    return [Suite(**entry) for entry in lanes[lane]]


def with_files(suites: list[Suite], files: list[str]) -> list[Suite]:
    """The suites with the files that they ask for; raises ValueError for another number of them."""
    wanted = max(suite.files for suite in suites)
    if len(files) != wanted:
        raise ValueError(f"this lane takes {wanted} files and got {len(files)}")
    return [replace(suite, run=suite.run + files[: suite.files]) for suite in suites]


def rehearsed(suites: list[Suite]) -> tuple[list[Suite], list[str]]:
    """What runs without the lane's machine, and the names of suites that cannot.

    Raises ValueError if nothing does.
    """
    if not any(suite.dry for suite in suites):
        raise ValueError("this lane has no --dry-run; run it without")
    kept = [replace(suite, run=suite.dry, env={**suite.env, "TRITON_INTERPRET": "0"})
            for suite in suites if suite.dry]  # fmt: skip
    return kept, [suite.name for suite in suites if not suite.dry]


def run_suite(suite: Suite) -> Outcome:
    """Runs one suite, without standard input, and ends all it started when its time is up."""
    command = [word.replace("{python}", sys.executable) for word in suite.run]
    print(f"\n=== {suite.name}: {' '.join(command)}", flush=True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell has what runs in the background ignore it, and children would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **suite.env},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        failure = None
        try:
            status = process.wait(timeout=suite.minutes * 60)
            if status:
                failure = f"exit status {status}"
        except subprocess.TimeoutExpired:
            failure = f"took longer than its share of {suite.minutes:g} min and was ended"
            # As from a keyboard: a test runner then still says what had failed by now.
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)
        finally:
            end_group(process.pid)
    seconds = time.monotonic() - started
    print(f"=== {suite.name}: {failure or 'passed'} after {seconds:.0f} s", flush=True)
    return Outcome(suite, seconds, failure)


def end_group(group: int) -> None:
    """Ends whatever a suite left running, so that no server outlives it."""
    try:
        os.killpg(group, signal.SIGTERM)
        time.sleep(0.5)
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def run_lane(suites: list[Suite]) -> list[Outcome]:
    """Runs suites in order and stops only after a required one failed.

    vLLM keeps what it learnt of a model class by the hash of one file, though base classes stand in
    others; so its cache is the checkout's own, and that part of it starts empty.
    """
    cache = Path(os.environ.setdefault("VLLM_CACHE_ROOT", str(ROOT / ".cache" / "vllm")))
    shutil.rmtree(cache / "modelinfos", ignore_errors=True)
    outcomes = []
    for suite in suites:
        outcomes.append(run_suite(suite))
        if suite.required and outcomes[-1].failure:
            break
    return outcomes


def report(suites: list[Suite], outcomes: list[Outcome]) -> int:
    """Prints one line for each suite and returns the exit status."""
    print(f"\n{'suite':36} seconds   share  result")
    for outcome in outcomes:
        print(
            f"{outcome.suite.name:36} {outcome.seconds:7.0f} {outcome.suite.minutes * 60:7.0f}  "
            f"{outcome.failure or 'passed'}"
        )
    for suite in suites[len(outcomes) :]:
        print(f"{suite.name:36}       -       -  not reached")
    failed = sum(outcome.failure is not None for outcome in outcomes)
    print(f"suites: {len(outcomes) - failed} passed, {failed} failed")
    return 1 if failed or len(outcomes) < len(suites) else 0


def main(argv: list[str]) -> int:
    """`ci/run LANE [--dry-run] [FILE ...]`."""
    if not argv:
        print("usage: ci/run LANE [--dry-run] [FILE ...], with a lane of ci/suites.toml",
              file=sys.stderr)  # fmt: skip
        return 2
    files, left_out = [word for word in argv[1:] if word != "--dry-run"], list[str]()
    try:
        suites = suites_of(argv[0], (ROOT / "ci" / "suites.toml").read_text())
        suites = with_files(suites, files)
        if "--dry-run" in argv:
            suites, left_out = rehearsed(suites)
    except ValueError as error:
        print(f"ci/run: {error}", file=sys.stderr)
        return 2
    status = report(suites, run_lane(suites))
    if left_out:
        print(f"left out, since they need the machine: {', '.join(left_out)}")
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
